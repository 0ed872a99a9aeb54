"""Pages of remote datasets on this machine's disk: bounded, shared by its workers, unharmed when one is killed."""

import fcntl
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Semaphore

_LOCKS = 64
_WRITERS = 2
"""Pages that a worker writes at once: the threads that fetch are twice as many."""
_PART = 16
"""A look at how much there is takes long where that is much. Between two looks a worker writes this part of what there
is room for; and what is removed leaves room for this part of all."""


class PageCache:
    """One file to a page, which appears when all of it is there. What was not used for longest goes first."""

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        self._room = 0
        """Bytes that may be written before the next look."""
        self._writers = Semaphore(_WRITERS)
        self._works = limit > 0
        if self._works:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                self._do_without(error)

    @contextmanager
    def locked(self, run: int) -> Iterator[None]:
        """Of several workers that want a run of pages one at a time goes on; a killed one lets go."""
        if not self._works:
            yield
            return
        with (self._folder / f".lock-{run % _LOCKS}").open("w") as lock:
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
        """Keep a page, unless too many are being written: a disk may be slower than the storage. Where it is full or
        cannot be written, the run goes on without."""
        if not self._works or not self._writers.acquire(blocking=False):
            return
        path = self._path(page)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            draft.write_bytes(data)
            draft.rename(path)
            self._room -= len(data)
            if self._room < 0:
                self._room = self._make_room() // _PART
        except OSError as error:
            with suppress(OSError):
                draft.unlink(missing_ok=True)
            self._do_without(error)
        finally:
            self._writers.release()

    def forget(self, page: int) -> None:
        """It was damaged."""
        with suppress(OSError):
            self._path(page).unlink(missing_ok=True)

    def _path(self, page: int) -> Path:
        return self._folder / f"{page:09d}"

    def _make_room(self) -> int:
        """Bytes for which there is room, of all datasets together."""
        found: list[tuple[float, int, str]] = []
        for folder in self._folder.parent.iterdir():
            for entry in os.scandir(folder):
                with suppress(OSError):  # another worker may have removed it
                    stat = entry.stat()
                    found.append((stat.st_mtime, stat.st_size, entry.path))
        total = sum(size for _, size, _ in found)
        if total > self._limit:
            for _, size, path in sorted(found):
                if size and total > self._limit - self._limit // _PART:  # locks are empty
                    Path(path).unlink(missing_ok=True)
                    total -= size
        return self._limit - total

    def _do_without(self, error: OSError) -> None:
        self._works = False
        warnings.warn(f"pages are no longer kept in {self._folder}: {error}; the run goes on without", stacklevel=3)
