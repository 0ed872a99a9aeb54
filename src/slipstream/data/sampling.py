"""Preparing whole samples once: read from their source, over processes where that takes long, and written in shards."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np

from slipstream.data.holding import Samples
from slipstream.data.making import Making
from slipstream.data.manifest import Manifest
from slipstream.data.order import permute
from slipstream.data.spreading import spread

_BATCH = 2**20
"""Bytes that a process makes at a time."""
_KEY = 1


Reader = Callable[[], np.ndarray]


class SampleSource(Protocol):
    """Samples by number."""

    holds: Samples
    identity: dict[str, Any]
    """All that determines them, as JSON."""
    costly: bool
    """Whether reading is worth several processes."""

    def __len__(self) -> int: ...

    def reader(self, numbers: np.ndarray) -> Reader:
        """What reads the samples with these numbers, in this order. If it is costly, it is sent to other processes."""
        ...


def prepare_samples(source: SampleSource, making: Making) -> Manifest:
    """Make a dataset of all samples."""
    guard = making.begin()
    identity = {**source.identity, "samples": repr(asdict(source.holds)), "batch": _BATCH}
    writer = making.writer(source.holds, identity, guard)
    readers = _readers(source, writer.progress.batches)
    for items in spread(_read, readers, making.workers if source.costly else 1):
        writer.add(items)
        making.progress(writer.items, writer.items)
    return writer.finish()


def stored(places: np.ndarray, count: int) -> np.ndarray:
    """Which samples of the source lie at these places. They are mixed, always in the same way: sources are often sorted
    by class, and samples of a page are used, or held out, together."""
    return permute(places, count, _KEY)


def _readers(source: SampleSource, first: int) -> Iterator[Reader]:
    """Of all samples, from batch number `first` on."""
    count, each = len(source), max(1, _BATCH // source.holds.dtype.itemsize)
    for start in range(first * each, count, each):
        yield source.reader(stored(np.arange(start, min(start + each, count)), count))


def _read(reader: Reader) -> np.ndarray:
    return reader()
