"""What every preparation is told, and how it begins."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.data.destinations import PROGRESS, Destination, entries
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

    @property
    def folder(self) -> Path:
        """Where files grow."""
        return self.dest.folder

    def make(self, how: Callable[["Making"], Manifest]) -> Manifest:
        """The dataset. Where it is refused before anything of it was whole, no file is left that was not there."""
        self.dest.refuse_if_prepared()
        existed, before = self.folder.exists(), entries(self.folder)
        try:
            return how(self)
        except ValueError:
            if not (self.folder / PROGRESS).exists():
                for path in set(entries(self.folder)) - set(before):
                    path.unlink()
                if not existed and self.folder.exists():
                    self.folder.rmdir()
            raise

    def begin(self) -> Guard:
        """The folder, empty or with a part of the same; what closes the files in it."""
        self.dest.refuse_if_prepared()
        guard = guard_to_write(self.folder, self.encrypt)
        self.folder.mkdir(parents=True, exist_ok=True)
        return guard

    def writer(self, holds: Holds, identity: dict[str, Any], guard: Guard) -> ShardWriter:
        """Writes items after those that are there; `identity` is all that determines them, but for the shards."""
        page = page_of(holds.dtype)
        shard = max(1, self.shard // page) * page
        writer = ShardWriter(self.dest, holds, {**identity, "shard": self.shard}, shard, guard=guard)
        if writer.items:
            self.say(f"going on after {writer.items:,} {'tokens' if isinstance(holds, Ids) else 'samples'}")
        return writer
