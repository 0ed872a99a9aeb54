"""The files of a prepared dataset on this machine, read as those in object storage are (storage.py)."""

from pathlib import Path

import numpy as np

from slipstream.data.manifest import Manifest
from slipstream.data.pages import DamagedShard


class Folder:
    """Shards are mapped into memory: workers of one machine share them."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self._path, self.address = path, str(path)
        size = manifest.dtype.itemsize
        self._sizes = {shard.name: shard.items * size for shard in manifest.shards}
        self._maps: dict[str, np.ndarray] = {}

    def read(self, name: str, start: int = 0, end: int | None = None) -> memoryview:
        """A file, or the part of a shard from `start` to `end`."""
        if end is not None:
            return self.map(name)[start:end].data
        return memoryview(self._existing(name).read_bytes())

    def map(self, shard: str) -> np.ndarray:
        """All bytes of a shard."""
        if shard not in self._maps:
            self._maps[shard] = _mapped(self._whole(shard))
        return self._maps[shard]

    def check_sizes(self) -> None:
        """Raise DamagedShard if a shard is missing, or not as long as it was: what can be seen without reading any."""
        for shard in self._sizes:
            self._whole(shard)

    def map_file(self, name: str) -> memoryview:
        """All bytes of another file that has some."""
        return _mapped(self._existing(name)).data

    def _whole(self, shard: str) -> Path:
        path, expected = self._existing(shard), self._sizes[shard]
        if (size := path.stat().st_size) != expected:
            raise DamagedShard(
                f"{path} has {size:,} bytes instead of {expected:,}; copy it again, or prepare the dataset again"
            )
        return path

    def _existing(self, name: str) -> Path:
        path = self._path / name
        if not path.is_file():
            raise DamagedShard(f"{path} is missing; copy it again, or prepare the dataset again")
        return path


def _mapped(path: Path) -> np.ndarray:
    return np.memmap(path, dtype=np.uint8, mode="r").view(np.ndarray)
