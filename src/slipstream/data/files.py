"""Files that a source is made of, or a dataset: on this machine, or in object storage."""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from slipstream.data.storage import Storage, StorageGone

_AT_ONCE = 2**23
"""Bytes that are read of a remote file at a time."""
_PATTERN = re.compile(r"[*?\[]")
_WILD = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


@dataclass(frozen=True)
class RemoteFile:
    """A file in object storage, with what is used of a Path."""

    storage: Storage
    key: str
    """Its name in the storage."""
    size: int
    stamp: str
    """Another one if the file is."""

    def __str__(self) -> str:
        return f"{self.storage.address}/{self.key}"

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.key).suffixes

    def open(self, _mode: str = "rb") -> io.BufferedReader:
        """Read as it is asked for, some of it at a time."""
        return io.BufferedReader(_Reader(self), _AT_ONCE)


File = Path | RemoteFile


class _Reader(io.RawIOBase):
    def __init__(self, file: RemoteFile) -> None:
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.size}[whence]
        return self._place

    def readinto(self, into: Any) -> int:
        end = min(self._file.size, self._place + len(into))
        if self._place >= end:
            return 0
        found = self._file.storage.read(self._file.key, self._place, end)
        into[: len(found)] = found
        self._place += len(found)
        return len(found)


def size_of(file: File) -> int:
    """Bytes."""
    return file.stat().st_size if isinstance(file, Path) else file.size


def stamps(files: Sequence[File]) -> list[list[Any]]:
    """A change to a file changes them."""
    return [
        [str(file), size_of(file), file.stat().st_mtime_ns if isinstance(file, Path) else file.stamp] for file in files
    ]


def is_pattern(name: str) -> bool:
    """Whether a name stands for all that are like it."""
    return _PATTERN.search(name) is not None


def remote_files(address: str) -> list[RemoteFile]:
    """The file at an address, those named like it if it is a pattern, or else all in that folder and below; sorted.
    Raises ValueError if there are none."""
    try:
        found = _named_like(address) if is_pattern(address) else _at(address)
    except StorageGone as error:
        raise ValueError(str(error)) from None
    if not found:
        raise ValueError(f"there is no file {'like' if is_pattern(address) else 'at'} {address}")
    return found


def _at(address: str) -> list[RemoteFile]:
    folder, _, name = address.rstrip("/").rpartition("/")
    if PurePosixPath(name).suffix and (found := Storage(folder).find(name)):
        return [RemoteFile(Storage(folder), *found)]
    storage = Storage(address)
    return [RemoteFile(storage, *found) for found in storage.listed()]


def _named_like(address: str) -> list[RemoteFile]:
    folder = address[: address.rindex("/", 0, _PATTERN.search(address).start())]  # type: ignore[union-attr]
    storage, pattern = Storage(folder), address[len(folder) + 1 :]
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+])", pattern)
    expression = re.compile(
        "".join(_WILD.get(part) or (part if part[:1] == "[" else re.escape(part)) for part in parts)
    )
    return [RemoteFile(storage, *found) for found in storage.listed() if expression.fullmatch(found[0])]
