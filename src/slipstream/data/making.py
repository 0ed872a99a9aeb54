"""What every preparation is told, and how it begins."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from slipstream.data.destinations import PROGRESS, Claimed, Destination, claim, entries
from slipstream.data.guards import Guard
from slipstream.data.holding import Holds, Ids
from slipstream.data.manifest import Manifest, page_of
from slipstream.data.sealing import guard_to_write
from slipstream.data.writing import ShardWriter


@dataclass(frozen=True)
class Making:
    """Where a dataset is to be made, how, and whom to tell."""

    dest: Destination
    workers: int
    """Processes."""
    shard: int
    """Bytes of a shard."""
    encrypt: bool
    progress: Callable[[int, int], None]
    """Told how much is done, in what the source is measured in, and how many items it made."""
    say: Callable[[str], None]
    until_the_end: ExitStack = field(default_factory=ExitStack)
    """Closed when it is made, or is not to be."""

    @property
    def folder(self) -> Path:
        """Where files grow."""
        return self.dest.folder

    def make(self, how: Callable[["Making"], Manifest]) -> Manifest:
        """The dataset. Where it is refused before anything of it was whole, no file is left that was not there."""
        self.dest.refuse_if_prepared()
        existed, before = self.folder.exists(), entries(self.folder)
        try:
            with ExitStack() as until_the_end:
                return how(replace(self, until_the_end=until_the_end))
        except Claimed:  # what is new there is another's
            raise
        except ValueError:
            if not (self.folder / PROGRESS).exists():
                for path in set(entries(self.folder)) - set(before):
                    path.unlink()
                if not existed and self.folder.exists():
                    self.folder.rmdir()
            raise

    def begin(self) -> Guard:
        """The folder, empty or with a part of the same; what closes the files in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.until_the_end.enter_context(claim(self.folder))
        self.dest.refuse_if_prepared()  # again: another may have ended since
        return guard_to_write(self.folder, self.encrypt)

    def writer(self, holds: Holds, identity: dict[str, Any], guard: Guard) -> ShardWriter:
        """Writes items after those that are there; `identity` is all that determines them, but for the shards."""
        page = page_of(holds.dtype)
        shard = max(1, self.shard // page) * page
        writer = ShardWriter(self.dest, holds, {**identity, "shard": self.shard}, shard, guard=guard)
        if writer.items:
            self.say(f"going on after {writer.items:,} {'tokens' if isinstance(holds, Ids) else 'samples'}")
        return writer
