"""Where a dataset is made: in its folder, or in object storage, which gets each shard as soon as it is whole."""

import fcntl
import hashlib
import re
import shutil
from pathlib import Path
from typing import Protocol, TextIO

from slipstream.data.manifest import DOCUMENTS, FIRSTS, MANIFEST, PAGES, TOKENIZER, Manifest, manifest_text
from slipstream.data.storage import Storage, StorageGone, is_remote
from slipstream.runs.cache import cache_folder

PROGRESS = "progress.json"
_LOCK = ".lock"
_OURS = re.compile(
    rf"shard-\d+\.bin|\.?({'|'.join((PAGES, DOCUMENTS, FIRSTS, TOKENIZER, PROGRESS, MANIFEST))})|{re.escape(_LOCK)}"
)
"""Names of the files of a dataset, and their drafts."""


class Claimed(ValueError):
    """Another process prepares the same dataset."""


def claim(folder: Path) -> TextIO:
    """The folder is this process's alone until the file is closed; one that is killed lets go."""
    lock = (folder / _LOCK).open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise Claimed(f"{folder} is being prepared by another process; wait for its end, or choose another") from None
    return lock


def entries(folder: Path) -> list[Path]:
    """What is in a folder, if there is one. Raises ValueError for a file."""
    if folder.is_file():
        raise ValueError(f"{folder} is a file; say in which folder to make the dataset")
    return sorted(folder.iterdir()) if folder.exists() else []


class Destination(Protocol):
    """What a preparation writes to."""

    @property
    def folder(self) -> Path:
        """Where files grow that are not whole yet."""
        ...

    def refuse_if_prepared(self) -> None:
        """A dataset is never written over."""
        ...

    def keep(self, shard: Path) -> None:
        """This shard is whole."""
        ...

    def finish(self, manifest: Manifest, others: list[str]) -> None:
        """So is all else. The manifest comes last, and makes it a dataset."""
        ...


class InFolder:
    """On this machine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def refuse_if_prepared(self) -> None:
        if (self.folder / MANIFEST).exists():
            raise ValueError(f"{self.folder} is a prepared dataset already; remove it, or choose another folder")
        other = next((path.name for path in entries(self.folder) if not _OURS.fullmatch(path.name)), None)
        if other:
            raise ValueError(f"{self.folder} holds other files, such as {other}; choose an empty folder, or a new one")

    def keep(self, shard: Path) -> None:
        pass

    def finish(self, manifest: Manifest, others: list[str]) -> None:  # noqa: ARG002
        draft = self.folder / f".{MANIFEST}"
        draft.write_text(manifest_text(manifest), encoding="utf-8")
        draft.rename(self.folder / MANIFEST)
        for name in (PROGRESS, _LOCK):
            (self.folder / name).unlink(missing_ok=True)


class InStorage:
    """In object storage. This machine holds one shard at a time, and what is on record of the others."""

    def __init__(self, address: str) -> None:
        self._storage = Storage(address)
        self.folder = cache_folder() / "staging" / hashlib.sha256(address.encode()).hexdigest()[:24]

    def refuse_if_prepared(self) -> None:
        try:
            if not self._storage.find(MANIFEST):
                return
        except StorageGone as error:
            raise ValueError(str(error)) from None
        where = self._storage.address
        raise ValueError(f"{where} is a prepared dataset already; remove it, or choose another address")

    def keep(self, shard: Path) -> None:
        self._storage.write(shard.name, shard)
        shard.unlink()

    def finish(self, manifest: Manifest, others: list[str]) -> None:
        for name in others:
            self._storage.write(name, self.folder / name)
        self._storage.write(MANIFEST, manifest_text(manifest).encode())
        shutil.rmtree(self.folder)


def destination(where: str) -> Destination:
    """A folder, or an address in object storage."""
    return InStorage(where) if is_remote(where) else InFolder(Path(where))
