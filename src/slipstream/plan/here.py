"""Planning for the machine at hand: what it would take, whether it fits, and which layout is the quickest."""

import datetime
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median

import numpy as np

from slipstream.plan.accelerators import Accelerator, find_accelerator
from slipstream.plan.cost import THIS_MACHINE
from slipstream.plan.exchange import PLAIN, Agreement
from slipstream.plan.grid import RECOMPUTE, Grid, Hardware, Style, of_products
from slipstream.plan.layout import Layout
from slipstream.plan.machine import Machine
from slipstream.plan.memory import Memory, memory
from slipstream.plan.offer_table import Offer
from slipstream.plan.profile import load_profile, our_rates, profile_path
from slipstream.plan.rates import Rates
from slipstream.plan.search import (
    Found,
    Kind,
    Prospect,
    Refused,
    Wanted,
    layout_of,
    layouts_for,
    prospect,
    rows_of,
    shortfall,
)
from slipstream.plan.time import Times, step_time
from slipstream.runs.folder import append_line, read_lines

_LIKELY = 0.9
"""A layout is refused only if even so much of what it is thought to hold does not fit."""
_LAST = 20
"""Runs whose correction counts."""


@dataclass(frozen=True)
class Expected:
    """What one plan is expected to take on this machine."""

    times: Times
    memory: Memory

    @property
    def step(self) -> float:
        """Seconds."""
        return float(self.times.total)


class Here:
    """This machine, as far as it is known: measured by `slipstream probe`, or by its GPUs' data sheet."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.profile = load_profile(machine)
        self._sheet = _data_sheet(machine)

    @property
    def known(self) -> bool:
        """Whether anything can be said of its speed."""
        return self.profile is not None or self._sheet is not None

    def hardware(self, workers: int, precision: str) -> Hardware | None:
        """What each worker has; None if nothing is known."""
        precision = of_products(precision)
        if self.profile and (self.profile.device == "cpu" or precision in self.profile.peaks):
            return self.profile.hardware(workers, precision)
        sheet = self._sheet
        if sheet is None or precision not in sheet.peaks:
            return None
        short = precision in ("fp8", "int8")
        return Hardware(
            peak=sheet.peaks[precision],
            bits=8 if short else 16,
            peak_16=sheet.peaks["bf16" if short else precision],
            memory=float(sheet.memory),
            bandwidth=sheet.bandwidth,
            link=sheet.link,
            network=sheet.link,
            per_node=workers,
        )

    @property
    def rates(self) -> Rates:
        """The planner's constants here."""
        return self.profile.fitted if self.profile else our_rates()

    def capacity(self, workers: int) -> float | None:
        """Bytes that a worker may hold."""
        if self.machine.gpus:
            sheet = self._sheet
            return float(self.profile.memory) if self.profile else float(sheet.memory) if sheet else None
        return self.machine.memory / workers if self.machine.memory else None

    def predict(self, wanted: Wanted, layout: Layout, precision: str) -> Expected | None:
        """What a layout would take here, corrected by earlier runs; None if the machine's speed is not known."""
        on = self.hardware(layout.workers, precision)
        if on is None:
            return None
        grid = Grid.of(layout)
        style, agreement = self._style(wanted, precision), self._agreement(wanted)
        times = step_time(wanted.work, grid, wanted.batch, on, self.rates, style, agreement)
        return Expected(times.scaled(self.correction()), self._held(wanted, layout, precision))

    def correction(self) -> float:
        """What measured steps took beside predicted ones, over the last runs here."""
        path = self._corrections
        ratios = [float(line["ratio"]) for line in read_lines(path)][-_LAST:] if path.exists() else []
        return median(ratios) if ratios else 1.0

    def learn(self, predicted: float, measured: float) -> None:
        """Keep what a finished run has shown."""
        self._corrections.parent.mkdir(parents=True, exist_ok=True)
        ratio = self.correction() * measured / predicted  # the prediction was corrected already
        append_line(self._corrections, {"ratio": round(ratio, 4), "date": datetime.date.today().isoformat()})

    @property
    def _corrections(self) -> Path:
        return profile_path(self.machine).with_suffix(".corrections.jsonl")

    def refuse_if_too_large(self, wanted: Wanted, layout: Layout, precision: str) -> None:
        """Raise ValueError if a layout cannot fit, with what it would hold and the smallest change that helps."""
        capacity = self.capacity(layout.workers)
        held = self._held(wanted, layout, precision)
        if capacity is None or _LIKELY * float(held.total) <= capacity:
            return
        table = ", ".join(f"{name} {float(value) / 1e9:,.2f}" for name, value in vars(held).items() if value)
        change = self._smallest_change(wanted, layout, precision, capacity)
        raise ValueError(
            f"layout: {layout} needs {float(held.total) / 1e9:,.1f} GB on a worker, which has {capacity / 1e9:,.1f} GB "
            f"({table}); {change}"
        )

    def _smallest_change(self, wanted: Wanted, layout: Layout, precision: str, capacity: float) -> str:
        tries: list[tuple[str, Layout]] = []
        smaller = layout.micro_batch // 2
        while smaller:
            tries.append((f"layout.micro_batch={smaller}", layout.model_copy(update={"micro_batch": smaller})))
            smaller //= 2
        if wanted.splits.recompute:
            modes = RECOMPUTE[RECOMPUTE.index(layout.recompute) + 1 :]
            tries += [(f"layout.recompute={mode}", layout.model_copy(update={"recompute": mode})) for mode in modes]
        shared = layout.model_copy(update={"shard": layout.data, "replicate": 1})
        if layout.replicate > 1 and wanted.agreement.admits(Grid.of(shared)):
            tries.append((f"layout.shard={layout.data} (replicate=1)", shared))
        both = {"recompute": "full", "micro_batch": 1} if wanted.splits.recompute else {"micro_batch": 1}
        tries.append((", ".join(f"layout.{k}={v}" for k, v in both.items()), layout.model_copy(update=both)))
        for words, changed in tries:
            held = float(self._held(wanted, changed, precision).total)
            if held <= capacity:
                return f"it fits with {words}: {held / 1e9:,.1f} GB"
        held = float(self._held(replace(wanted, agreement=PLAIN), layout, precision).total)
        if held <= capacity:
            return f"it fits with exchange.kind allreduce and no codec: {held / 1e9:,.1f} GB"
        return "no layout of as many workers helps; use more of them, or a smaller model"

    def _style(self, wanted: Wanted, precision: str) -> Style:
        return wanted.style(precision, on_gpu=bool(self.machine.gpus))

    def _agreement(self, wanted: Wanted) -> Agreement:
        return replace(wanted.agreement, on_gpu=bool(self.machine.gpus))

    def _held(self, wanted: Wanted, layout: Layout, precision: str) -> Memory:
        style, agreement = self._style(wanted, precision), self._agreement(wanted)
        held = memory(wanted.work, Grid.of(layout), wanted.batch, wanted.optimizer_states, style, agreement)
        held = Memory(**{field.name: float(getattr(held, field.name)) for field in fields(Memory)})
        return replace(held, optimizer=0.0) if layout.offload == "optimizer" else held

    def search(self, wanted: Wanted, workers: int, price: float) -> Found:
        """The best layouts here, of so many workers and of fewer."""
        prospects: list[Prospect] = []
        refused: list[Refused] = []
        evaluated = 0
        precision = next((name for name in wanted.precisions if self.hardware(1, name)), None)
        for count in sorted({workers // share for share in (1, 2, 4, 8, 16) if workers // share}):
            on = self.hardware(count, precision) if precision else None
            if on is None or precision is None:
                continue
            grid, style, agreement = layouts_for(wanted, count), self._style(wanted, precision), self._agreement(wanted)
            held = memory(wanted.work, grid, wanted.batch, wanted.optimizer_states, style, agreement)
            evaluated += np.size(grid.tensor)
            capacity = self.capacity(count) or 0
            fitting = np.flatnonzero(held.total <= capacity)
            offer = _offer(self.machine, count, price, on)
            kind = Kind((offer,), precision, on)
            if not len(fitting):
                refused.append(shortfall(kind, held, capacity))
                continue
            times = step_time(wanted.work, grid, wanted.batch, on, self.rates, style, agreement)
            best = int(fitting[np.argmin(times.total[fitting])])
            chosen, seconds, bytes_held = (rows_of(columns, [best])[0] for columns in (grid, times, held))
            corrected = seconds.scaled(self.correction())
            prospects.append(prospect(wanted, kind, (offer, False), 1, layout_of(chosen), corrected, bytes_held))
        return Found(prospects, refused, evaluated)


def _data_sheet(machine: Machine) -> Accelerator | None:
    if not machine.gpus:
        return None
    try:
        return find_accelerator(machine.gpus[0])
    except ValueError:
        return None


def _offer(machine: Machine, workers: int, price: float, on: Hardware) -> Offer:
    """This machine as if it were rented."""
    accelerator = Accelerator(
        name=machine.gpus[0] if machine.gpus else "CPU worker", kind="cpu", memory=int(on.memory), bandwidth=0.0,
        peaks={}, link=0.0, link_kind="", linked=workers, source="measured", date="",
    )  # fmt: skip
    return Offer(
        cloud=THIS_MACHINE, machine="", accelerator=accelerator, count=workers, cores=machine.cores,
        memory=machine.memory, region="here", price=price, spot=None, link=on.link, link_kind="", network=0.0,
        network_kind="", network_assumed=False, date=datetime.date.today(),
    )  # fmt: skip
