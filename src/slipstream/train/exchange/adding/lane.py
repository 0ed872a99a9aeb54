"""Where coded sums run: in threads beside backward, on process groups of their own."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from slipstream.train.exchange.adding.base import Pending
from slipstream.train.exchange.codecs.base import key_of

_TRACKS = 2


class Lane:
    """One for an exchange. All workers send their buckets through it in the same order; on a CPU on two tracks, so that
    over a long link one bucket travels while the other waits for an answer."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._tracks = [ThreadPoolExecutor(1, thread_name_prefix="exchange") for _ in range(_TRACKS)]
        self._beside: dict[tuple[dist.ProcessGroup, int], dist.ProcessGroup] = {}
        self._stream: torch.cuda.Stream | None = None
        self._buckets = 0
        self.position = 0
        """Of the step's first sample in the run: what is random in a step follows from it."""
        self.total = 0
        """Samples in the run."""

    def group(self, group: dist.ProcessGroup, track: int) -> dist.ProcessGroup:
        """The same workers, in a group that nobody else talks in."""
        if (group, track) not in self._beside:
            made = dist.new_group(dist.get_process_group_ranks(group), use_local_synchronization=True)
            assert made is not None, "this worker is in it"
            self._beside[group, track] = made
        return self._beside[group, track]

    def number(self) -> int:
        """A number for a bucket; all workers ask in the same order."""
        self._buckets += 1
        return self._buckets - 1

    @staticmethod
    def track(bucket: int, device: torch.device) -> int:
        """The one that a bucket takes. On a GPU there is one: two exchanges at once would be in each other's way."""
        return bucket % _TRACKS if device.type == "cpu" else 0

    def key(self, *words: int | str) -> int:
        """A key that the job's seed and these words determine."""
        return key_of(self._seed, *words)

    def start(self, work: Callable[[], None], flat: Tensor, track: int) -> Pending:
        """Do the work in a track's thread, after what the device has been told so far."""
        thread = self._tracks[track]
        if not flat.is_cuda:
            return _Started(thread.submit(_without_gradients, work))
        before = torch.cuda.current_stream(flat.device).record_event()
        return _StartedOnGpu(thread.submit(self._on_own_stream, work, before, flat.device))

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
