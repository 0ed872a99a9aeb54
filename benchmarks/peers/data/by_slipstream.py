"""Slipstream, by the class that its own training reads with."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from reading import RANK, RANKS, SEED, Reading
from torch import Tensor

from slipstream.data import open_dataset
from slipstream.data.destinations import InFolder
from slipstream.data.sealing import guard_to_write
from slipstream.data.tokenizer import Ids
from slipstream.data.writing import ShardWriter, write_tokenizer
from slipstream.job import Job
from slipstream.plan import Layout, make_plan, this_machine
from slipstream.runs import Pulse
from slipstream.runs.pulse import create_pulse
from slipstream.train.batches import Batches


def write(tokens: np.ndarray, folder: Path, reading: Reading, encrypt: bool = False) -> None:
    guard, shard = guard_to_write(folder, encrypt), reading.shard * reading.sequence * 2
    write_tokenizer(folder, b"", guard)
    writer = ShardWriter(InFolder(folder), Ids(2**16, None, None), {}, shard, guard=guard)
    for start in range(0, len(tokens), 512):
        some = tokens[start : start + 512].reshape(-1)
        writer.add(some, np.array([len(some)]))
    writer.add(np.zeros(1, np.uint16), np.array([1]))  # the target of the last token
    writer.finish()


class Loader:
    def __init__(self, reading: Reading, state: int | None) -> None:
        job = Job.model_validate(
            {
                "name": "reading",
                "seed": SEED,
                "model": {"kind": "decoder", "layers": 1, "hidden": 16, "heads": 2},
                "data": {"prepared": reading.address, "sequence": reading.sequence},
                "train": {"epochs": 1, "batch": reading.batch * RANKS, "optimizer": {"name": "adamw", "lr": 1e-3}},
                "machines": {"device": "cpu"},
            }
        )
        plan = make_plan(job, this_machine(), layout=Layout(replicate=RANKS, micro_batch=reading.batch))
        self._batches = Batches(job, plan, open_dataset(job), RANK)
        self._seen, self._each = state or 0, job.train.batch

    def __iter__(self) -> Iterator[Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            create_pulse(Path(folder) / "pulse", 1)
            for share in self._batches.from_sample(self._seen, Pulse(Path(folder) / "pulse", 0)):
                self._seen += self._each
                yield share.micro_batches[0].inputs.long()  # as training does, where the model is

    def state(self) -> int:
        return self._seen
