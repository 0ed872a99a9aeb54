"""Work that is spread over processes, with its results in order."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from threading import Event, Semaphore
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")
_AHEAD = 3
"""Tasks for each process that are on their way."""


def nothing() -> None:
    """How a process begins that needs nothing."""


def spread(
    work: Callable[[T], R],
    tasks: Iterable[T],
    workers: int,
    begin: Callable[..., None] = nothing,
    given: tuple[Any, ...] = (),
) -> Iterator[R]:
    """`work` of every task, in their order; `begin` is called with what is `given` once in every process. Only a few
    tasks are on their way at once."""
    if workers == 1:
        begin(*given)
        yield from map(work, tasks)
        return
    room, over = Semaphore(_AHEAD * workers), Event()

    def ahead() -> Iterator[T]:
        for task in tasks:
            room.acquire()
            if over.is_set():
                return
            yield task

    with multiprocessing.get_context("forkserver").Pool(workers, begin, given) as pool:
        try:
            for result in pool.imap(work, ahead()):
                room.release()
                yield result
        finally:  # after an error the pool waits for the thread that reads ahead, which may be waiting for room
            over.set()
            room.release()
