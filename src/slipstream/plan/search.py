"""Searching: every offer, count of machines and layout, and of those the cheapest, the soonest, or both.

For one kind of machine and one count the best layout is the quickest that fits, whatever the prices. So each kind is
searched once, however many clouds and regions rent it out, and prices come after.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, Literal

import numpy as np

from slipstream.plan.cost import FAILURES, RESTART, SAVING, Bill, Waste, bill, least_waste
from slipstream.plan.exchange import PLAIN, Agreement
from slipstream.plan.grid import RECOMPUTE, SHARDED, Grid, Hardware, Style, hardware_of, style_of
from slipstream.plan.layout import Layout
from slipstream.plan.memory import Memory, memory
from slipstream.plan.offer_table import Offer
from slipstream.plan.profile import our_rates
from slipstream.plan.rates import Rates
from slipstream.plan.time import Times, step_time
from slipstream.plan.work import Work

MACHINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 4096, 8192)
MOST_ACCELERATORS = 16_384
_MOST_TOKENS = 2**16
"""In a micro-batch on one worker: nothing gets quicker beyond."""
_ROOM = 0.95
"""Part of an accelerator's memory that a plan may fill: what is predicted is that much off at times."""
_PREEMPTION = 0.05


@dataclass(frozen=True)
class Splits:
    """Which axes a model can be split along, and how far."""

    tensor: tuple[int, ...] = (1,)
    """Numbers of tensor workers that divide its heads and widths."""
    stages: int = 1
    """Most stages of a pipeline."""
    context: tuple[int, ...] = (1,)
    recompute: bool = False
    """Whether its blocks are known."""
    micro_batch: int | None = None
    """The only one, if the job says so."""


@dataclass(frozen=True)
class Wanted:
    """What is to be planned: a job in numbers."""

    work: Work
    splits: Splits
    batch: int
    samples: float
    """Of the whole run."""
    optimizer_states: float
    precisions: tuple[str, ...]
    """Those that will do, the quickest first; an accelerator takes the first that it has."""
    data_bytes: float = 0.0
    checkpoints: int = 2
    """How many are kept."""
    deadline: float | None = None
    budget: float | None = None
    quota: int = MOST_ACCELERATORS
    """Most accelerators."""
    preemption: float = _PREEMPTION
    """How often a spot machine is taken away in an hour."""
    fixed: tuple[tuple[str, float], ...] = ()
    """What the job itself says of the layout, as columns of a grid and their values."""
    agreement: Agreement = PLAIN
    """How workers agree."""
    eager: bool = False
    """Whether blocks are never compiled."""
    fixed_order: bool = False
    """Whether a GPU must add up in a fixed order."""
    by_rows: bool = False
    """Whether fp8 has a scale for each row."""

    def style(self, precision: str, on_gpu: bool = True) -> Style:
        """Our program, as it does this job."""
        own = "fp8-rows" if self.by_rows and precision == "fp8" else precision
        return style_of(own, on_gpu, self.eager, self.fixed_order)

    @cached_property
    def flops(self) -> float:
        """Of a step, without recomputation."""
        return float(self.work.flops * self.batch)


@dataclass(frozen=True)
class Prospect:
    """A plan that could be: some machines, a layout, and what it would come to."""

    offer: Offer
    machines: int
    spot: bool
    layout: Layout
    precision: str
    times: Times
    memory: Memory
    seconds: float
    """Of the whole run, failures and checkpoints included."""
    waste: Waste
    bill: Bill
    utilisation: float
    """Arithmetic that the model needs, as a part of what the accelerators could do."""

    @property
    def accelerators(self) -> int:
        """All of them."""
        return self.machines * self.offer.count

    @property
    def cost(self) -> float:
        """Dollars."""
        return self.bill.total

    @property
    def step(self) -> float:
        """Seconds."""
        return float(self.times.total)


@dataclass(frozen=True)
class Kind:
    """Offers that are the same but for cloud, region and price."""

    offers: tuple[Offer, ...]
    precision: str
    on: Hardware


@dataclass(frozen=True)
class Refused:
    """Why a kind of machine has no plan."""

    kind: Kind
    short: float
    """Bytes that are missing on each accelerator with the layout that needs least; infinite if no layout can be."""
    term: str
    """The largest part of what that needs."""

    @property
    def reason(self) -> str:
        """In words."""
        name, count = self.kind.offers[0].accelerator.name, self.kind.offers[0].count
        if self.short == math.inf:
            return f"{name}: no layout of the job fits machines of {count}, within limits.accelerators"
        missing = f"{self.short / 1e9:,.3g} GB are missing on each with the layout that needs least"
        return f"{name}: {missing}, most of it {self.term}"


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    prospects: list[Prospect]
    refused: list[Refused]
    evaluated: int
    """Layouts looked at."""


def search(
    wanted: Wanted,
    offers: Iterable[Offer],
    spot: Literal["never", "also", "only"] = "also",
    rates: Rates | None = None,
    scale: float = 1.0,
    slower: bool = False,
) -> Found:
    """The best layout of every kind and count of machines, at the best price of every cloud.

    `scale` is what measured steps took beside predicted ones; `slower`, also counts that are no quicker than fewer.
    """
    prospects: list[Prospect] = []
    refused: list[Refused] = []
    evaluated = 0
    candidates = cache(partial(_candidates, wanted))  # kinds with as many accelerators to a machine share them
    fitting = cache(lambda *shape, room: _fitting(candidates(*shape), room))
    for kind in kinds(offers, wanted.precisions):
        shape = (kind.offers[0].count, int(kind.on.per_node), kind.precision)
        best = _best_layouts(wanted, kind, fitting(*shape, room=_ROOM * kind.on.memory), rates or our_rates(), slower)
        evaluated += np.size(candidates(*shape).total)
        if not best:
            refused.append(shortfall(kind, candidates(*shape).held, _ROOM * kind.on.memory))
        rented = _cheapest_of_each_cloud(kind.offers, spot)
        for machines, layout, times, held in best:
            scaled = times.scaled(scale)
            prospects += [prospect(wanted, kind, each, machines, layout, scaled, held) for each in rented]
    return Found(prospects, refused, evaluated)


def kinds(offers: Iterable[Offer], precisions: Sequence[str]) -> list[Kind]:
    """Offers by what they are, those that can run the precision."""
    groups: dict[tuple[Any, ...], list[Offer]] = {}
    for offer in offers:
        if offer.accelerator.kind == "gpu":
            key = (offer.accelerator.name, offer.count, offer.link, offer.network)
            groups.setdefault(key, []).append(offer)
    found = []
    for group in groups.values():
        precision = next((name for name in precisions if name in group[0].accelerator.peaks), None)
        if precision:
            found.append(Kind(tuple(group), precision, hardware_of(group[0], precision)))
    return found


@dataclass(frozen=True)
class _Candidates:
    """Layouts for all counts of machines, and what they hold; those that differ in recomputation are neighbours."""

    grid: Grid
    held: Memory
    total: Any
    """Bytes, [layouts, ways to recompute]."""


def _fitting(candidates: _Candidates, room: float) -> tuple[Grid, Memory]:
    """Those that fit into so much memory, each with the least recomputation: computing less is always quicker."""
    fits = candidates.total <= room
    possible = fits.any(axis=1)
    rows = np.flatnonzero(possible) * fits.shape[1] + fits[possible].argmax(axis=1)
    return _rows(candidates.grid, rows), _rows(candidates.held, rows)


def _best_layouts(
    wanted: Wanted, kind: Kind, fitting: tuple[Grid, Memory], rates: Rates, slower: bool
) -> list[tuple[int, Layout, Times, Memory]]:
    """For each count of machines the quickest layout, where it is quicker than with fewer machines, or all.

    What fits comes by rising count.
    """
    grid, held = fitting
    if not np.size(grid.tensor):
        return []
    count = kind.offers[0].count
    style = wanted.style(kind.precision)
    times = step_time(wanted.work, grid, wanted.batch, kind.on, rates, style, wanted.agreement)
    total = times.total
    workers = grid.workers
    firsts = np.flatnonzero(np.diff(workers, prepend=0))
    best = np.array([part.argmin() for part in np.split(total, firsts[1:])]) + firsts
    before = np.minimum.accumulate(np.concatenate(([np.inf], total[best][:-1])))
    chosen = best[slower | (total[best] < before)]
    machines = (int(many // count) for many in workers[chosen])
    layouts = (layout_of(one) for one in rows_of(grid, chosen))
    return list(zip(machines, layouts, rows_of(times, chosen), rows_of(held, chosen), strict=True))


def _candidates(wanted: Wanted, count: int, linked: int, precision: str) -> _Candidates:
    tokens, quota = int(wanted.work.tokens), min(wanted.quota, MOST_ACCELERATORS)
    columns = _layouts(wanted.splits, wanted.batch, tokens, count, linked, quota)
    if not wanted.fixed and not str(wanted.agreement):
        # Replicas that share out the optimiser's state exchange as much as gradients, hold less and update less.
        worth = (columns["replicate"] == 1) | (columns["shard"] > 1)
        columns = {name: column[worth] for name, column in columns.items()}
    grid = _as_fixed(_with_recompute(columns, wanted.splits), wanted)
    style = wanted.style(precision)
    held = memory(wanted.work, grid, wanted.batch, wanted.optimizer_states, style, wanted.agreement)
    modes = len(RECOMPUTE) if wanted.splits.recompute and "recompute" not in dict(wanted.fixed) else 1
    return _Candidates(grid, held, held.total.reshape(-1, modes))


def _as_fixed(grid: Grid, wanted: Wanted) -> Grid:
    """Those layouts that are as the job says, and that its workers can agree on."""
    fits = wanted.agreement.admits(grid) & np.ones(np.shape(grid.tensor), dtype=bool)
    for name, value in wanted.fixed:
        fits &= getattr(grid, name) == value
    return grid if fits.all() else _rows(grid, fits)


def layouts_for(wanted: Wanted, workers: int) -> Grid:
    """All layouts of so many workers in one machine."""
    rows = list(_layouts_of(wanted.splits, wanted.batch, int(wanted.work.tokens), workers, workers))
    return _as_fixed(_with_recompute(_columns(rows), wanted.splits), wanted)


def _with_recompute(columns: dict[str, Any], splits: Splits) -> Grid:
    modes = len(RECOMPUTE) if splits.recompute else 1
    repeated = {name: np.repeat(column, modes) for name, column in columns.items()}
    return Grid(**repeated, recompute=np.tile(np.arange(float(modes)), len(columns["tensor"])))


def _columns(rows: list[tuple[int, ...]]) -> dict[str, Any]:
    names = ("replicate", "shard", "tensor", "pipeline", "context", "micro_batch", "stages", "sharded")
    return dict(zip(names, np.array(rows, dtype=float).reshape(-1, len(names)).T, strict=True))


@cache
def _layouts(splits: Splits, batch: int, tokens: int, count: int, linked: int, quota: int) -> dict[str, Any]:
    rows = [
        row
        for machines in MACHINES
        if machines * count <= quota
        for row in _layouts_of(splits, batch, tokens, machines * count, linked)
    ]
    return _columns(rows)


def _layouts_of(splits: Splits, batch: int, tokens: int, workers: int, linked: int) -> Iterator[tuple[int, ...]]:
    for tensor in (size for size in splits.tensor if size <= linked and workers % size == 0):
        for pipeline in _powers(min(splits.stages, workers // tensor)):
            for context in splits.context:
                inside = tensor * pipeline * context
                if workers % inside or workers // inside > batch:
                    continue
                data = workers // inside
                yield from _shared_out(splits, batch, tokens, (tensor, pipeline, context), data, linked)


def _shared_out(
    splits: Splits, batch: int, tokens: int, inside: tuple[int, int, int], data: int, linked: int
) -> Iterator[tuple[int, ...]]:
    tensor, pipeline, context = inside
    share = -(-batch // data)
    near = max(1, linked // (tensor * context))
    for shard in {1, data, near if data % near == 0 and near < data else data}:
        # The optimiser's state shared out among some is never better than among all.
        for sharded in (0,) if shard == 1 else (1, 3) if shard == data else (3,):
            for micro_batch in [min(splits.micro_batch, share)] if splits.micro_batch else _powers(share):
                if micro_batch > 1 and micro_batch * tokens / context > _MOST_TOKENS and not splits.micro_batch:
                    continue
                if pipeline > 1 and batch % (data * micro_batch):
                    continue
                for stages in (1, 2) if pipeline > 1 else (1,):
                    if stages == 2 and ((share // micro_batch) % pipeline or 2 * pipeline > splits.stages):
                        continue
                    yield (data // shard, shard, tensor, pipeline, context, micro_batch, stages, sharded)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(max(1, most).bit_length())]


def _rows(columns: Any, which: Any) -> Any:
    return type(columns)(**{name: v[which] if np.ndim(v) else v for name, v in vars(columns).items()})


def rows_of(columns: Any, which: Sequence[int]) -> list[Any]:
    """Some rows of columns, each by itself."""
    parts = [v[which].tolist() if np.ndim(v) else [float(v)] * len(which) for v in vars(columns).values()]
    return [type(columns)(*row) for row in zip(*parts, strict=True)]


def layout_of(one: Grid) -> Layout:
    """The layout in a row of a grid."""
    return Layout(
        replicate=int(one.replicate),
        shard=int(one.shard),
        tensor=int(one.tensor),
        pipeline=int(one.pipeline),
        context=int(one.context),
        micro_batch=int(one.micro_batch),
        sharded=SHARDED[int(one.sharded)] if one.shard > 1 else "parameters",
        schedule="interleaved" if one.stages > 1 else "1f1b",
        recompute=RECOMPUTE[int(one.recompute)],
    )


def shortfall(kind: Kind, held: Memory, room: float) -> Refused:
    """What is missing where nothing fits."""
    if not np.size(held.total):
        return Refused(kind, math.inf, "")
    (least,) = rows_of(held, [int(np.argmin(held.total))])
    term = max(vars(least), key=lambda name: getattr(least, name))
    return Refused(kind, float(least.total - room), term)


def _cheapest_of_each_cloud(offers: Sequence[Offer], spot: str) -> list[tuple[Offer, bool]]:
    best: dict[tuple[str, str, bool], Offer] = {}
    for offer in offers:
        for wish in (False, True):
            price = offer.spot if wish else offer.price
            if price is None or (wish and spot == "never") or (not wish and spot == "only"):
                continue
            key = (offer.cloud, offer.machine, wish)
            known = best.get(key)
            if known is None or price < ((known.spot if wish else known.price) or 0):
                best[key] = offer
    return [(offer, wish) for (_, _, wish), offer in best.items()]


def prospect(
    wanted: Wanted,
    kind: Kind,
    rented: tuple[Offer, bool],
    machines: int,
    layout: Layout,
    times: Times,
    held: Memory,
) -> Prospect:
    """What machines and a layout come to: failures, checkpoints and prices."""
    offer, spot = rented
    steps = -(-wanted.samples // wanted.batch)
    accelerators = machines * offer.count
    failures = accelerators * FAILURES + (machines * wanted.preemption if spot else 0.0)
    waste = least_waste(failures / 3600, float(held.parameters + held.optimizer) / SAVING, RESTART)
    seconds = steps * float(times.total) / (1 - waste.part) if waste.part < 1 else float("inf")
    price = (offer.spot if spot else offer.price) or 0.0
    state = 4 * (1 + wanted.optimizer_states) * float(wanted.work.parameters)
    spent = bill(
        offer.cloud,
        machines * price,
        seconds,
        wanted.data_bytes + wanted.checkpoints * state,
        4 * float(wanted.work.parameters),
    )
    utilisation = wanted.flops / (float(times.total) * accelerators * float(kind.on.peak))
    return Prospect(offer, machines, spot, layout, kind.precision, times, held, seconds, waste, spent, utilisation)


def feasible(prospects: Iterable[Prospect], wanted: Wanted) -> list[Prospect]:
    """Those within deadline and budget."""
    deadline = float("inf") if wanted.deadline is None else wanted.deadline
    budget = float("inf") if wanted.budget is None else wanted.budget
    return [each for each in prospects if each.seconds <= deadline and each.cost <= budget]


def pareto(prospects: Iterable[Prospect]) -> list[Prospect]:
    """Those that no other beats in both time and cost, the cheapest first."""
    front: list[Prospect] = []
    for each in sorted(prospects, key=lambda each: (each.cost, each.seconds)):
        if not front or each.seconds < front[-1].seconds:
            front.append(each)
    return front
