"""Pages of remote datasets on this machine's disk: bounded, shared by its workers, unharmed when one is killed."""

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCKS = 64
_LOOKS_EVERY = 32
"""Pages that are written between two looks at how much there is."""


class PageCache:
    """One file to a page, which appears when all of it is there. What was not used for longest goes first."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._written = 0
        self._works = limit > 0
        if self._works:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self._do_without(error)

    @contextmanager
    def locked(self, page: int) -> Iterator[None]:
        """Of several workers that want a page one at a time goes on; a killed one lets go."""
        if not self._works:
            yield
            return
        with (self._folder / f".lock-{page % _LOCKS}").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def get(self, page: int) -> memoryview | None:
        """A page, if it is here."""
        if not self._works:
            return None
        path = self._path(page)
        with suppress(OSError):
            data = path.read_bytes()
            os.utime(path)
            return memoryview(data)
        return None

    def put(self, page: int, data: memoryview) -> None:
        """Keep a page. Where the disk is full or cannot be written, the run goes on without."""
        if not self._works:
            return
        path = self._path(page)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_bytes(data)
            draft.rename(path)
            self._written += 1
            if self._written % _LOOKS_EVERY == 0:
                self._make_room()
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            self._do_without(error)

    def forget(self, page: int) -> None:
        """It was damaged."""
        with suppress(OSError):
            self._path(page).unlink(missing_ok=True)

    def _path(self, page: int) -> Path:
        return self._folder / f"{page:09d}"

    def _make_room(self) -> None:
        found: list[tuple[float, int, Path]] = []
        for path in self._folder.parent.glob("*/[0-9]*"):  # of all datasets
            with suppress(OSError):  # another worker may have removed it
                stat = path.stat()
                found.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self._limit:
                return
            path.unlink(missing_ok=True)
            total -= size

    def _do_without(self, error: OSError) -> None:
        self._works = False
        warnings.warn(f"pages are no longer kept in {self._folder}: {error}; the run goes on without", stacklevel=3)
