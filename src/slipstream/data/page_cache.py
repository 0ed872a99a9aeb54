"""Pages of remote datasets on this machine's disk: bounded, shared by its workers, unharmed when one is killed."""

import errno
import fcntl
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from mmap import mmap
from pathlib import Path
from queue import Empty, SimpleQueue

from slipstream.data.order import RUN

_LOCKS = 64
_WRITERS = 2
"""Runs that a worker writes at once: the threads that fetch are twice as many."""
_PART = 16
"""A look at how much there is takes long where that is much. Between two looks a worker writes this part of what there
is room for; and what is removed leaves room for this part of all."""
_BLOCK = 4096
"""Bytes: what a disk takes from memory directly begins and ends at a multiple of this."""
Fetched = tuple[int, memoryview]
"""A page, and what it is stored as."""


class PageCache:
    """One file to a run of pages, in which each has its place; `page` is how many bytes one has at most. A page may be
    there in part, after a kill: who reads it checks it. The run that was not used for longest goes first.

    They are written past the system's own cache, if the disk allows it: that would copy them, and fill memory with what
    is read again an epoch later.
    """

    def __init__(self, folder: Path, limit: int, page: int) -> None:
        self._folder, self._limit = folder, limit
        self._place = -(-page // _BLOCK) * _BLOCK
        """Bytes."""
        self._room = 0
        """Bytes that may be written before the next look."""
        self._direct = getattr(os, "O_DIRECT", 0)
        self._drafts: SimpleQueue[mmap | None] = SimpleQueue()
        """What is written is put there first; None where there is no memory for it yet."""
        for _ in range(_WRITERS):
            self._drafts.put(None)
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

    def get(self, page: int, size: int) -> memoryview | None:
        """What is here of a page, if anything is."""
        if not self._works:
            return None
        run, number = divmod(page, RUN)
        start = number * self._place
        with suppress(OSError), self._path(run).open("rb", buffering=0) as file:
            if os.lseek(file.fileno(), start, os.SEEK_DATA) == start:
                os.utime(file.fileno())
                return memoryview(os.pread(file.fileno(), size, start))
        return None

    def put(self, pages: Sequence[Fetched]) -> None:
        """Keep neighbouring pages, unless too many are being written: a disk may be slower than the storage. Where it
        is full or cannot be written, the run goes on without."""
        if not self._works:
            return
        try:
            draft = self._drafts.get_nowait() or mmap(-1, RUN * self._place)
        except Empty:
            return
        try:
            for run, some in groupby(pages, lambda each: each[0] // RUN):
                self._write(run, list(some), draft)
            if self._room < 0:
                self._room = self._make_room() // _PART
        except OSError as error:
            self._do_without(error)
        finally:
            self._drafts.put(draft)

    def _write(self, run: int, pages: list[Fetched], draft: mmap) -> None:
        for number, (_, data) in enumerate(pages):
            draft[number * self._place : number * self._place + len(data)] = data
        last = (len(pages) - 1) * self._place + len(pages[-1][1])
        with memoryview(draft)[: -(-last // _BLOCK) * _BLOCK] as whole:
            start = pages[0][0] % RUN * self._place
            try:
                _write_at(self._path(run), start, whole, self._direct)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                self._direct = 0  # some file systems know nothing of it
                _write_at(self._path(run), start, whole, self._direct)
            self._room -= len(whole)

    def _path(self, run: int) -> Path:
        return self._folder / f"run-{run:08d}"

    def _make_room(self) -> int:
        """Bytes for which there is room, of all datasets together."""
        found: list[tuple[float, int, str]] = []
        for folder in self._folder.parent.iterdir():
            for entry in os.scandir(folder):
                with suppress(OSError):  # another worker may have removed it
                    stat = entry.stat()
                    found.append((stat.st_mtime, min(stat.st_size, 512 * stat.st_blocks), entry.path))
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


def _write_at(path: Path, start: int, data: memoryview, direct: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | direct, 0o666)
    try:
        if os.pwrite(file, data, start) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finally:
        os.close(file)
