"""Work that is spread over processes, with its results in order."""

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing.connection import wait
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
    # Not multiprocessing.Pool: after an error it may wait for ever, for a process that waits to hand it a large result.
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, context, _begin, (begin, given)) as pool:
        underway: deque[Future[R]] = deque()
        try:
            for task in tasks:
                underway.append(pool.submit(work, task))
                if len(underway) == _AHEAD * workers:
                    yield underway.popleft().result()
            while underway:
                yield underway.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _begin(begin: Callable[..., None], given: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin(*given)


def _end_with_parent() -> None:
    """Nobody else would end a process whose parent was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this is a child"
    wait([parent.sentinel])
    os._exit(1)
