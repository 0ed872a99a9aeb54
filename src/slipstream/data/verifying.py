"""Checking every byte of a prepared dataset."""

from collections.abc import Callable, Iterator
from pathlib import Path

from slipstream.data.files import File, remote_files, size_of
from slipstream.data.holding import Ids
from slipstream.data.manifest import DOCUMENTS, checksum
from slipstream.data.prepared import manifest_at
from slipstream.data.sealing import guard_of
from slipstream.data.storage import is_remote


def verify(where: str, checked: Callable[[int], None]) -> Iterator[str]:
    """What is wrong, file by file; `checked` is told of every byte that was looked at."""
    manifest = manifest_at(where, "DEST")
    guard_of(manifest, where)  # that the manifest is the one which was prepared; the rest follows from it
    there = _files(where)
    size = manifest.dtype.itemsize
    for shard in manifest.shards:
        file, expected = there.get(shard.name), shard.items * size
        if not file:
            yield f"{shard.name} is missing"
        elif size_of(file) != expected:
            yield f"{shard.name} has {size_of(file):,} bytes instead of {expected:,}"
        elif checksum(file) != shard.sha256:
            yield f"{shard.name} is damaged: its bytes are not those that were prepared"
        checked(expected)
    for name, sha256 in manifest.sha256.items():
        if name not in there:
            yield f"{name} is missing"
        elif checksum(there[name]) != sha256:
            yield f"{name} is damaged, or of another dataset"
    if isinstance(manifest.holds, Ids) and not manifest.seal and DOCUMENTS in there:
        documents = size_of(there[DOCUMENTS]) // 8 - 1
        if documents != manifest.documents:
            yield f"manifest.json is damaged: it says {manifest.documents:,} documents, and there are {documents:,}"
    known = {shard.name for shard in manifest.shards}
    for name in there:
        if name.startswith("shard-") and name.endswith(".bin") and name not in known:
            yield f"{name} is not part of this dataset"


def _files(where: str) -> dict[str, File]:
    found: list[File] = (
        list(remote_files(where))
        if is_remote(where)
        else [path for path in sorted(Path(where).iterdir()) if path.is_file()]
    )
    return {file.name: file for file in found}
