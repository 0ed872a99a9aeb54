"""How much memory a process and those it has started take at most."""

import re
import threading
from contextlib import suppress
from pathlib import Path

_EVERY = 0.05
_OWN = re.compile(r"^Pss_(?:Anon|Shmem):\s+(\d+)", re.MULTILINE)
"""What is in memory only. Pages that were forked are shared out among those who have them; of files there are none."""


class Peak:
    """Looks at processes as long as they run. Pages of files do not count: the system takes them back at will."""

    def __init__(self) -> None:
        self.bytes = 0
        self._end = threading.Event()

    def watch(self, pid: int) -> None:
        """Look at this process and its children from now on, in a thread."""
        self._thread = threading.Thread(target=self._look, args=(pid,), daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._end.set()
        self._thread.join()

    def _look(self, pid: int) -> None:
        while not self._end.wait(_EVERY):
            self.bytes = max(self.bytes, sum(map(_memory, _family(pid))))


def _family(pid: int) -> list[int]:
    found = [pid]
    for each in found:  # it grows meanwhile
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            with suppress(OSError):
                found += map(int, children.read_text().split())
    return found


def _memory(pid: int) -> int:
    with suppress(OSError):  # it has ended
        return 1024 * sum(map(int, _OWN.findall(Path(f"/proc/{pid}/smaps_rollup").read_text())))
    return 0
