"""Where the workers of a launch meet: rendezvous, pulse, failure records. In memory: no full disk silences them."""

import shutil
import tempfile
from pathlib import Path


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

    def remove(self) -> None:
        """Remove it, as far as it is still there."""
        shutil.rmtree(self.path, ignore_errors=True)
