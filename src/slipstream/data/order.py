"""The order of samples: a pure function of the job, the same for any number of workers and from any point."""

import hashlib
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_WORD = 2**64 - 1
_Words = npt.NDArray[np.uint64]


def permute(positions: np.ndarray, size: int, key: int) -> np.ndarray:
    """Where a pseudo-random permutation of range(size), chosen by `key`, sends these positions.

    Nothing is stored: a Feistel network permutes a rectangle a little larger than `size`, and what it sends outside
    range(size) is sent through again until it falls inside (Black & Rogaway 2002, "Ciphers with arbitrary domains").
    """
    assert 1 <= size <= 2**62, "the sum in _feistel must fit a word"
    keys = [_mix_int(key + number * 0x9E3779B97F4A7C15) for number in range(1, _ROUNDS + 1)]
    values = _feistel(positions.astype(np.uint64), size, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], size, keys)
    return values.astype(np.int64)


def _feistel(values: _Words, size: int, keys: list[int]) -> _Words:
    """A permutation of range(rows · columns): in turn, each half is moved by an amount that the other half decides."""
    rows = math.isqrt(size - 1) + 1
    columns = -(-size // rows)
    halves = [values // np.uint64(columns), _rest(values, columns)]
    for number, key in enumerate(keys):
        moved, length = number % 2, (rows, columns)[number % 2]
        move = _mix(halves[1 - moved] ^ np.uint64(key)) >> np.uint64(1)
        halves[moved] = _rest(halves[moved] + move, length)
    return halves[0] * np.uint64(columns) + halves[1]


def _rest(values: _Words, divisor: int) -> _Words:
    """What a division leaves. numpy divides many words at once, but takes `%` of one after the other."""
    return values - values // np.uint64(divisor) * np.uint64(divisor)


def _mix(values: _Words) -> _Words:
    """The finaliser of splitmix64: every bit of the input reaches every bit of the result."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    return int(_mix(np.array([value & _WORD], dtype=np.uint64))[0])


def key_of(seed: int, purpose: str) -> int:
    """Of a permutation for this purpose."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest(), "little")


RUN = 8
"""Pages in a row that are fetched at once: a storage gives few large parts sooner than many small ones."""
WINDOW = 8
"""Runs whose samples are mixed."""


_CHUNK = 4096
"""Positions that are computed at once, at most: a hundred at a time would take nearly as long."""


@dataclass(frozen=True)
class Order:
    """Which samples are held out, and in which order the others come, epoch after epoch.

    Where samples lie together in pages, the order has two steps, so that only some pages are needed at a time: runs of
    pages come in a random order, and of every WINDOW of them in a row the samples are mixed. Held out are whole pages,
    from everywhere.
    """

    samples: int
    """All samples of the dataset."""
    validation: float
    """Part of them held out."""
    seed: int
    """The job's."""
    together: int = 1
    """Samples in a page; 1 where any sample is as near as any other."""

    @property
    def window_size(self) -> int:
        """Samples in a window that is whole."""
        return WINDOW * RUN * self.together

    @property
    def held_out(self) -> int:
        """Samples for evaluation: at least one if any are asked for, and at least one is left to train on."""
        wanted = max(1, round(self.samples * self.validation)) if self.validation else 0
        return min(wanted, self.samples - 1)

    @property
    def training(self) -> int:
        """Samples in one epoch."""
        return self.samples - self.held_out

    def indices(self, start: int, count: int) -> np.ndarray:
        """Dataset numbers of the training samples at positions start … start + count - 1 of the run."""
        size = min(_CHUNK, 16 * self.training)  # of a few samples, thousands would be as many epochs
        first, last = start // size, (start + count - 1) // size
        found = [_chunk(self, number, size) for number in range(first, last + 1)]
        whole = found[0] if len(found) == 1 else np.concatenate(found) if found else np.empty(0, np.int64)
        return whole[start - first * size : start - first * size + count]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Dataset numbers of the training samples at these positions of the run."""
        epochs, places = np.divmod(positions, self.training)
        slots = np.empty_like(places)
        for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
            here = epochs == epoch
            slots[here] = self._shuffled(places[here], f"epoch {epoch}")
        if self.together == 1:
            return self._split(slots + self.held_out)
        places, lengths = _gaps(self)
        numbers: np.ndarray = slots + lengths[np.searchsorted(places, slots, side="right")]
        return numbers

    def window(self, position: int) -> range:
        """Positions of the run whose samples are mixed with that of this one, which begins an epoch or a window."""
        epoch, place = divmod(position, self.training)
        size = self.window_size
        first = place // size * size
        start = epoch * self.training
        return range(start + first, start + min(first + size, self.training))

    def _shuffled(self, places: np.ndarray, purpose: str) -> np.ndarray:
        """Where an epoch's permutation sends these places."""
        if self.together == 1:
            return permute(places, self.training, key_of(self.seed, purpose))
        size = self.window_size
        windows, inside = np.divmod(places, size)
        mixed = np.empty_like(places)
        for window in range(int(windows.min()), int(windows.max()) + 1):
            here, first = windows == window, window * size
            length = min(size, self.training - first)
            mixed[here] = first + permute(inside[here], length, key_of(self.seed, f"{purpose}, window {window}"))
        return self._move(mixed, self.training, RUN * self.together, f"{purpose}, runs")

    def _move(self, places: np.ndarray, size: int, length: int, purpose: str) -> np.ndarray:
        """Whole pieces of this length change places; a last one that is shorter stays where it is."""
        pieces, whole = places // length, size // length
        first = int(pieces.min(initial=whole))
        between = np.arange(first, pieces.max(initial=0) + 1)
        few = len(between) < len(pieces)  # as in a window: each is permuted once
        moved = between if few else pieces.copy()
        if (inside := moved < whole).any():
            moved[inside] = permute(moved[inside], whole, key_of(self.seed, purpose))
        found: np.ndarray = (moved[pieces - first] if few else moved) * length + places - pieces * length
        return found

    def validation_indices(self) -> np.ndarray:
        """Dataset numbers of the held-out samples, always in the same order."""
        return self._split(np.arange(self.held_out))

    def _split(self, slots: np.ndarray) -> np.ndarray:
        """The first slots are held out; which samples stand in them follows from the seed."""
        return self._move(slots, self.samples, self.together, "split")


@lru_cache(maxsize=8)
def _gaps(order: Order) -> tuple[np.ndarray, np.ndarray]:
    """What is held out leaves gaps between the others. Where, counted in samples to train on, and how many samples are
    held out before each place and the next."""
    slots = np.arange(0, order.held_out, order.together)
    starts, lengths = order._split(slots), np.minimum(order.together, order.held_out - slots)
    sort = np.argsort(starts)
    before = np.concatenate(([0], np.cumsum(lengths[sort])))
    return starts[sort] - before[:-1], before


@lru_cache(maxsize=16)  # those of two windows, and some
def _chunk(order: Order, number: int, size: int) -> np.ndarray:
    found = order.at(np.arange(number * size, (number + 1) * size))
    found.flags.writeable = False  # many callers share it
    return found
