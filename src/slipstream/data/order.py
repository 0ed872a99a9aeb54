"""The order of samples: a pure function of the job, the same for any number of workers and from any point."""

import hashlib
import math
from dataclasses import dataclass

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
    halves = [values // np.uint64(columns), values % np.uint64(columns)]
    for number, key in enumerate(keys):
        moved, length = number % 2, np.uint64((rows, columns)[number % 2])
        move = _mix(halves[1 - moved] ^ np.uint64(key)) >> np.uint64(1)
        halves[moved] = (halves[moved] + move) % length
    return halves[0] * np.uint64(columns) + halves[1]


def _mix(values: _Words) -> _Words:
    """The finaliser of splitmix64: every bit of the input reaches every bit of the result."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _mix_int(value: int) -> int:
    return int(_mix(np.array([value & _WORD], dtype=np.uint64))[0])


def _key(seed: int, purpose: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed}/{purpose}".encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Order:
    """Which samples are held out, and in which order the others come, epoch after epoch."""

    samples: int
    """All samples of the dataset."""
    validation: float
    """Part of them held out."""
    seed: int
    """The job's."""

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
        positions = np.arange(start, start + count)
        epochs, places = np.divmod(positions, self.training)
        slots = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            slots[here] = permute(places[here], self.training, _key(self.seed, f"epoch {epoch}"))
        return self._numbers(slots + self.held_out)

    def validation_indices(self) -> np.ndarray:
        """Dataset numbers of the held-out samples, always in the same order."""
        return self._numbers(np.arange(self.held_out))

    def _numbers(self, slots: np.ndarray) -> np.ndarray:
        """The first slots are held out; which samples stand in them follows from the seed."""
        return permute(slots, self.samples, _key(self.seed, "split"))
