"""Where coded sums run: in a thread beside backward, one after the other, on process groups of their own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.train.exchange.adding.base import Pending
from slipstream.train.exchange.codecs.base import key_of


class Lane:
    """One for an exchange. All workers send their buckets through it in the same order."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="exchange")
        self._beside: dict[dist.ProcessGroup, dist.ProcessGroup] = {}
        self._stream: torch.cuda.Stream | None = None
        self._buckets = 0
        self.position = 0
        """Of the step's first sample in the run: what is random in a step follows from it."""
        self.total = 0
        """Samples in the run."""

    def group(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        """The same workers, in a group that nobody else talks in."""
        if group not in self._beside:
            made = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
            assert made is not None, "this worker is in it"
            self._beside[group] = made
        return self._beside[group]

    def number(self) -> int:
        """A number for a bucket; all workers ask in the same order."""
        self._buckets += 1
        return self._buckets - 1

    def key(self, *words: int | str) -> int:
        """A key that the job's seed and these words determine."""
        return key_of(self._seed, *words)

    def start(self, work: Callable[[], None], flat: Tensor) -> Pending:
        """Do the work in the thread, after what the device has been told so far."""
        if not flat.is_cuda:
            return _Started(self._thread.submit(_without_gradients, work))
        before = torch.cuda.current_stream(flat.device).record_event()
        return _StartedOnGpu(self._thread.submit(self._on_own_stream, work, before, flat.device))

    def _on_own_stream(
        self, work: Callable[[], None], before: torch.cuda.Event, device: torch.device
    ) -> torch.cuda.Event:
        torch.cuda.set_device(device)  # a setting of each thread
        self._stream = self._stream or torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_event(before)
        with torch.cuda.stream(self._stream):
            _without_gradients(work)
            done: torch.cuda.Event = self._stream.record_event()
            return done


def _without_gradients(work: Callable[[], None]) -> None:
    with torch.no_grad():  # also a setting of each thread
        work()


class _Started:
    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self) -> object:
        return self._done.result()


class _StartedOnGpu:
    def __init__(self, done: "Future[torch.cuda.Event]") -> None:
        self._done = done

    def wait(self) -> object:
        torch.cuda.current_stream().wait_event(self._done.result())
        return None
