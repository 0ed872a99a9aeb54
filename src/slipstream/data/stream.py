"""Fetching ahead: the next batches are made while the device is busy with this one."""

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from queue import Empty, Queue
from typing import TypeVar

T = TypeVar("T")
_LAST_FETCH = 5.0
"""Seconds in which the worker should come to its end. One that waits for a storage would take too long."""


@dataclass(frozen=True)
class _Failure:
    error: BaseException


def prefetch(fetch: Callable[[int], T], start: int, stop: int, depth: int = 2) -> Generator[T, None, None]:
    """`fetch(step)` for every step from start to stop, in order, up to `depth` results ahead, in one thread.

    A thread, not a process: moving batches between processes costs more than reading them. It starts with the first
    `next`, ends when the generator is closed, and an exception in `fetch` is raised where its result was awaited.
    """
    ready: Queue[T | _Failure] = Queue(maxsize=depth)
    closed = threading.Event()
    steps = range(start, stop)
    worker = threading.Thread(target=_work, args=(fetch, steps, ready, closed), name="prefetch", daemon=True)
    worker.start()
    try:
        for _ in steps:
            result = ready.get()
            if isinstance(result, _Failure):
                raise result.error
            yield result
    finally:
        closed.set()
        _drain(ready)  # the worker may be waiting for room: it finds some, and then sees that it is over
        worker.join(_LAST_FETCH)  # a process that ends while a thread is inside of torch is aborted by C++


def _work(fetch: Callable[[int], T], steps: range, ready: "Queue[T | _Failure]", closed: threading.Event) -> None:
    for step in steps:
        if closed.is_set():
            return
        try:
            ready.put(fetch(step))
        except BaseException as error:  # whatever it is, the consumer must not wait for a result that never comes
            ready.put(_Failure(error))
            return


def _drain(ready: "Queue[T | _Failure]") -> None:
    try:
        while True:
            ready.get_nowait()
    except Empty:
        return
