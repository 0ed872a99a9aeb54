"""Where the workers of a launch meet: rendezvous, pulse, failure records. In memory: no full disk silences them."""

import shutil
import tempfile
from pathlib import Path

NO_ANSWER = "(it did not answer: stopped, or stuck in the kernel)"
"""In the place of a stack."""


class Scratch:
    """A small folder that lives as long as one launch."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rendezvous = f"file://{path}/rendezvous"
        self.pulse = path / "pulse"

    @classmethod
    def create(cls) -> "Scratch":
        """A new one, in memory where the system has a file system there."""
        memory = Path("/dev/shm")
        return cls(Path(tempfile.mkdtemp(prefix="slipstream-", dir=memory if memory.is_dir() else None)))

    def failure(self, rank: int) -> Path:
        """Where a worker leaves the record of its failure."""
        return self.path / f"failure-{rank}.json"

    def stack(self, rank: int) -> Path:
        """Where a worker leaves its stack when asked."""
        return self.path / f"stack-{rank}.txt"

    def clear_stack(self, rank: int) -> None:
        """Before a worker is asked again."""
        if self.stack(rank).exists():
            self.stack(rank).write_text("")

    def read_stack(self, rank: int) -> str:
        """The stack that a worker has left, or why there is none."""
        if not self.stack(rank).exists():
            return "(it had not started yet)"
        return self.stack(rank).read_text() or NO_ANSWER

    def leave_exit_code(self, rank: int, code: int) -> None:
        """Left for the launcher by the process that a worker was forked from."""
        self._exit_code(rank).write_text(str(code))

    def exit_code(self, rank: int) -> int | None:
        """How a forked worker ended, if it has."""
        return _number_in(self._exit_code(rank))

    def leave_process(self, rank: int, process: int) -> None:
        """Left for the launcher by the process that a worker was forked from."""
        self._process(rank).write_text(str(process))

    def process(self, rank: int) -> int | None:
        """The id of a forked worker's process, if there is one."""
        return _number_in(self._process(rank))

    def _process(self, rank: int) -> Path:
        return self.path / f"process-{rank}"

    def _exit_code(self, rank: int) -> Path:
        return self.path / f"exit-{rank}"

    def forget(self, rank: int) -> None:
        """What an ended worker has left, so that another can take its place."""
        self.failure(rank).unlink(missing_ok=True)
        self.stack(rank).unlink(missing_ok=True)
        self._exit_code(rank).unlink(missing_ok=True)
        self._process(rank).unlink(missing_ok=True)

    def forget_meeting(self) -> None:
        """So that others can meet."""
        (self.path / "rendezvous").unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove it, as far as it is still there."""
        shutil.rmtree(self.path, ignore_errors=True)


def _number_in(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (FileNotFoundError, ValueError):  # not there yet, or not yet written
        return None
