"""Work that is spread over processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fleet import until
from slipstream.data.spreading import spread

LARGE = 2**22


def work(number: int) -> bytes:
    if number == 7:
        raise ValueError("broken 7")
    return bytes(LARGE)


def sleep(number: int) -> None:
    time.sleep(60 + number)


def test_an_error_is_raised_while_large_results_are_on_their_way() -> None:
    """Often: it was a race that processes lost."""
    for _ in range(8):
        found = 0
        with pytest.raises(ValueError, match="broken 7"):
            for result in spread(work, range(400), 2):
                found += len(result) == LARGE
        assert found == 7, "those before it, in their order"


def test_killed_it_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "main.py").write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from slipstream.data.spreading import spread\nfrom test_data_spreading import sleep\n"
        "if __name__ == '__main__':\n    list(spread(sleep, range(4), 2))\n"
    )
    started = subprocess.Popen([sys.executable, "main.py"], cwd=tmp_path, start_new_session=True)
    until(lambda: len(session(started.pid)) >= 4)  # itself, who forks, and two who work
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    until(lambda: not session(started.pid), 20)
    assert not session(started.pid)


def session(number: int) -> list[str]:
    asked = subprocess.run(["ps", "-o", "pid=", "-s", str(number)], capture_output=True, text=True, check=False)
    return asked.stdout.split()
