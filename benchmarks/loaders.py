"""The sides of `benchmarks/data.py`: their datasets, and one reading by one of them in processes of its own."""

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import console, run_all
from cpu_train import PEERS, environments
from memory import Peak
from slipstream.fleet.workers import KEEP_MEMORY

PEERS_PYTHON = Path(__file__).parent.parent / ".venv-peers/bin/python"
sys.path.append(str(PEERS / "data"))
from reading import Reading  # noqa: E402


class Side(NamedTuple):
    """Who reads."""

    module: str
    """In peers/data."""
    peer: bool = True
    """A library, in the environment of the peers; it is tried with processes of its own, too."""
    storage: bool = True
    """Whether it reads from object storage."""


SIDES = {
    "slipstream": Side("by_slipstream", peer=False),
    "litdata": Side("by_litdata"),
    "mosaicml-streaming": Side("by_mosaic"),
    "datasets-map": Side("by_datasets_map", storage=False),
    "datasets-iterable": Side("by_datasets_stream"),
    "bare": Side("by_numpy", peer=False),
    "encrypted": Side("by_slipstream_encrypted", peer=False),
}
OURS = ("slipstream", "encrypted")
"""The same tokens and the same program; one dataset is encrypted."""


class Turn(NamedTuple):
    """One side with so many processes of its loader."""

    side: str
    workers: int

    def __str__(self) -> str:
        return f"{self.side}, {self.workers} workers" if self.workers else self.side


@dataclass(frozen=True)
class Shape:
    """What is read."""

    sequence: int = 2048
    batch: int = 8
    samples: int = 97_600
    """A tenth of them makes whole batches, on two ranks too: no library has to drop or to fill up any."""

    @property
    def batches(self) -> int:
        return self.samples // self.batch


class Datasets:
    """The same tokens in the form of each side, in a folder, and a place for what is measured."""

    def __init__(self, root: Path, shape: Shape, storage: str = "") -> None:
        self.root, self.shape, self._storage = root, shape, storage
        root.mkdir()
        _write_tokens(root / "tokens.bin", shape)

    def make(self, sides: Sequence[str]) -> None:
        """Write the datasets of these sides."""
        for side in sides:
            folder = self.root / SIDES[side].module
            if not folder.exists():
                console.print(f"writing {self.shape.samples:,} samples for {side}", style="dim")
                folder.mkdir()
                task = {"tokens": str(self.root / "tokens.bin"), "reading": asdict(self._reading(side))}
                self._run(side, task, 1)

    def upload(self, sides: Sequence[str], address: str) -> None:
        """Copy them to object storage, from where they are read from then on."""
        import obstore
        from obstore.store import from_url

        store = from_url(address, client_options={"allow_http": True, "timeout": "300s"})
        for side in sides:
            module = SIDES[side].module
            console.print(f"uploading {module}", style="dim")
            for path in sorted((self.root / module).rglob("*")):
                if path.is_file():
                    obstore.put(store, str(path.relative_to(self.root)), path)
        self._storage = address

    def read(
        self,
        turn: Turn,
        *,
        state: Path | None = None,
        save_after: int = 0,
        resume: bool = False,
        stop: int = 0,
        order: bool = False,
        ranks: int = 1,
        peak: Peak | None = None,
    ) -> list[dict[str, Any]]:
        """Read the epoch, or `stop` batches of it; what each rank found. The state after `save_after` batches is left
        in the file `state`, or one `resume`s from there."""
        task = {
            "state": str(state or self.root / "state"),
            "save_after": save_after,
            "resume": resume,
            "stop": stop,
            "order": order,
            "memory": peak is not None,
        }
        cache = self.root / "cache"  # always of this name, which litdata's state remembers; and empty
        shutil.rmtree(cache, ignore_errors=True)
        cache.mkdir()
        reading = asdict(self._reading(turn.side, turn.workers, ranks, str(cache)))
        return self._run(turn.side, {**task, "reading": reading}, ranks, str(cache), peak)

    def _reading(self, side: str, workers: int = 0, ranks: int = 1, cache: str = "") -> Reading:
        module, shape = SIDES[side].module, self.shape
        address = f"{self._storage}/{module}" if self._storage else str(self.root / module)
        return Reading(address, cache, shape.sequence, shape.batch // ranks, shape.samples, workers)

    def _run(
        self, side: str, task: dict[str, Any], ranks: int, cache: str = "", peak: Peak | None = None
    ) -> list[dict[str, Any]]:
        outs = [self.root / f"out-{rank}.json" for rank in range(ranks)]
        for out in outs:
            out.unlink(missing_ok=True)
        python = str(PEERS_PYTHON) if SIDES[side].peer else sys.executable
        tasks = [{**task, "module": SIDES[side].module, "out": str(out)} for out in outs]
        commands = [[python, str(PEERS / "data/reader.py"), json.dumps(each)] for each in tasks]
        # Slipstream's workers are started with this allocator (fleet/workers.py).
        own = {**KEEP_MEMORY, "SLIPSTREAM_CACHE": cache} if side in OURS else {}
        ways = [{**each, **own, "GLOBAL_RANK": each.get("RANK", "0")} for each in environments(ranks)]
        run_all(commands, ways, self.root / "log", timeout=1200, peak=peak)
        return [json.loads(out.read_text()) for out in outs if out.exists()]


def _write_tokens(path: Path, shape: Shape) -> None:
    """Random tokens, a few far more frequent than the rest; the first two of a sample are its number."""
    block = 1024
    drawn = (np.random.default_rng(0).zipf(1.3, block * shape.sequence) % 50_000).astype(np.uint16)
    drawn = drawn.reshape(block, shape.sequence)
    with path.open("wb") as file:
        for start in range(0, shape.samples, block):
            rows, samples = drawn[: shape.samples - start], np.arange(start, min(start + block, shape.samples))
            rows[:, 0], rows[:, 1] = samples >> 16, samples & 0xFFFF
            file.write(rows.data)


def choose_sides(wanted: Sequence[str]) -> list[str]:
    """Those that can be run; of the others it is said."""
    there = PEERS_PYTHON.exists()
    missing = [side for side in wanted if SIDES[side].peer and not there]
    if missing:
        console.print(f"left out: {'; '.join(missing)} (make .venv-peers/.installed)")
    return [side for side in wanted if side not in missing]


def turns_of(sides: Sequence[str]) -> list[Turn]:
    """Libraries in this process and with two of their own."""
    return [Turn(side, workers) for side in sides for workers in ((0, 2) if SIDES[side].peer else (0,))]


def clean_environment() -> None:
    """Nothing is asked of the network."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITDATA_DISABLE_VERSION_CHECK": "1"})
