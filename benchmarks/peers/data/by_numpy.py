"""No library: a memory map and a permutation; from object storage, parts of 1 MiB, eight at a time, as they come.

The ceiling: nothing is checked, no window is mixed from afar.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from reading import RANK, RANKS, SEED, Reading, as_int64
from torch import Tensor

NAME = "tokens.bin"
_PART = 2**20


def write(tokens: np.ndarray, folder: Path, reading: Reading) -> None:  # noqa: ARG001
    tokens.tofile(folder / NAME)


class Loader:
    def __init__(self, reading: Reading, state: int | None) -> None:
        self._reading, self._done = reading, state or 0

    def __iter__(self) -> Iterator[Tensor]:
        return self._from_storage() if self._reading.remote else self._from_disk()

    def _from_disk(self) -> Iterator[Tensor]:
        rows = np.memmap(Path(self._reading.address) / NAME, np.uint16, "r").reshape(-1, self._reading.sequence)
        rows = rows.view(np.ndarray)
        order = np.random.default_rng(SEED).permutation(len(rows))
        each = self._reading.batch
        for start in range(self._done, len(rows), each * RANKS):
            mine = order[start + RANK * each : start + (RANK + 1) * each]
            self._done += each * RANKS
            yield as_int64(rows[mine])

    def _from_storage(self) -> Iterator[Tensor]:
        import obstore
        from obstore.store import from_url

        store = from_url(self._reading.address, client_options={"allow_http": True})
        size, each = self._reading.samples * self._reading.sequence * 2, self._reading.batch
        starts = range(self._done * self._reading.sequence * 2, size, _PART)
        with ThreadPoolExecutor(8) as pool:
            parts = pool.map(
                lambda start: obstore.get_range(store, NAME, start=start, end=min(size, start + _PART)), starts
            )
            for part in parts:
                rows = np.frombuffer(part, np.uint16).reshape(-1, self._reading.sequence)
                for start in range(0, len(rows), each):
                    self._done += each
                    yield as_int64(rows[start : start + each])

    def state(self) -> int:
        return self._done
