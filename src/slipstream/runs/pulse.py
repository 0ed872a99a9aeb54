"""The pulse: where each worker is, in a small shared file that outlives a worker killed without warning.

Writing is a few bytes into shared memory, so a worker says where it is many times in a step; the launcher reads it to
draw progress, to notice a worker that hangs, and to say where one was when it died.
"""

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_SEAT = struct.Struct("<qqd24sq")  # number of beats, step, time of the last beat, phase, number of beats again


@dataclass(frozen=True)
class Beat:
    """What a worker last said of itself."""

    step: int
    time: float
    """As `time.monotonic()` has it, which all processes of a machine share."""
    phase: str


class Pulse:
    """One worker's hand on the shared file."""

    def __init__(self, path: Path, rank: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._offset = rank * _SEAT.size
        self._count = 0
        self.step = 0
        self.phase = "start"

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Say which phase this is. A phase that fails stays on record, so that a report can name it."""
        before = self.phase
        self.beat(phase)
        yield
        self.beat(before)

    def beat(self, phase: str | None = None) -> None:
        """A sign of life."""
        self.phase = phase or self.phase
        self._count += 1
        beat = _SEAT.pack(self._count, self.step, time.monotonic(), self.phase.encode()[:24], self._count)
        self._memory[self._offset : self._offset + _SEAT.size] = beat  # not pack_into, which first writes zeros


def create_pulse(path: Path, workers: int) -> None:
    """An empty file with a seat for each worker."""
    path.write_bytes(_SEAT.pack(0, 0, time.monotonic(), b"start", 0) * workers)


def read_pulse(path: Path) -> list[Beat]:
    """What every worker last said."""
    while True:
        seats = list(_SEAT.iter_unpack(path.read_bytes()))
        # A seat read in the middle of a beat has two different numbers.
        if all(first == last for first, *_, last in seats):
            return [Beat(step, at, phase.rstrip(b"\0").decode()) for _, step, at, phase, _ in seats]
