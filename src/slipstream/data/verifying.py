"""Checking every byte of a prepared dataset."""

from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.data.manifest import checksum, read_manifest
from slipstream.data.sealing import guard_of


def verify(folder: Path, checked: Callable[[int], None]) -> Iterator[str]:
    """What is wrong, file by file; `checked` is told of every byte that was looked at."""
    manifest = read_manifest(folder, "DEST")
    guard_of(manifest, str(folder))  # that the manifest is the one which was prepared; the rest follows from it
    size = manifest.dtype.itemsize
    expected = {shard.name: (shard.sha256, shard.items * size) for shard in manifest.shards}
    for name, (sha256, bytes_expected) in expected.items():
        path = folder / name
        if not path.is_file():
            yield f"{name} is missing"
        elif path.stat().st_size != bytes_expected:
            yield f"{name} has {path.stat().st_size:,} bytes instead of {bytes_expected:,}"
        elif checksum(path) != sha256:
            yield f"{name} is damaged: its bytes are not those that were prepared"
        checked(bytes_expected)
    for name, sha256 in manifest.sha256.items():
        if not (folder / name).is_file():
            yield f"{name} is missing"
        elif checksum(folder / name) != sha256:
            yield f"{name} is damaged, or of another dataset"
    for path in sorted(folder.glob("shard-*.bin")):
        if path.name not in expected:
            yield f"{path.name} is not part of this dataset"
