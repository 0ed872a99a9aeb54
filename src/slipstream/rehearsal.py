"""A few steps of a job in this process, as its only worker would take them; of what would follow nothing is done."""

import gc
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from slipstream.job import Job, dump
from slipstream.plan import Plan
from slipstream.runs import Pulse, RunFolder, read_lines
from slipstream.runs.pulse import create_pulse


class Enough(Exception):
    """The steps that were wanted are done."""


class Until(Pulse):
    """A pulse that ends the run before a step."""

    def __init__(self, path: Path, last: int) -> None:
        self._last = last
        super().__init__(path, 0)

    @property
    def step(self) -> int:
        """The step that is being done."""
        return self._step

    @step.setter
    def step(self, number: int) -> None:
        self._step = number
        self.reached(number)

    def reached(self, number: int) -> None:
        """A step begins."""
        if number > self._last:
            raise Enough


def rehearse(job: Job, plan: Plan, pulse: Callable[[Path], Until]) -> list[dict[str, Any]]:
    """Train until the pulse has enough; the lines of the steps that were read by then."""
    import torch

    from slipstream.train.control import Control
    from slipstream.train.loop import train
    from slipstream.train.world import Seat, World

    torch.set_num_threads(plan.threads)
    with tempfile.TemporaryDirectory(prefix="slipstream-rehearsal-") as folder:
        run = RunFolder.create(Path(folder) / "run", dump(job))
        create_pulse(Path(folder) / "pulse", 1)
        world = World.join(Seat(0, 1, ""), plan.device)
        with suppress(Enough):
            train(job, plan, run, world, pulse(Path(folder) / "pulse"), Control(job, 0.0, saves=False), None)
        gc.unfreeze()  # the loop thought that what it had made would stay
        gc.collect()
        if plan.device == "cuda":
            torch.cuda.empty_cache()
        return list(read_lines(run.metrics))
