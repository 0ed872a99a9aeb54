"""What an exchange holds and sends, by its settings: terms of memory and of time, and the layouts it goes with.

A sum of n bytes over p workers sends 2 (p - 1)/p n from each (Thakur, Rabenseifner and Gropp 2005), whether it is of
gradients or of codes of them. A code is not free: making and reading it moves memory, and what backward computes at the
same time does not hide that (Agarwal et al. 2022, arXiv 2103.00543, who count it by itself too).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from slipstream.job.codecs import AnyCodec, is_worth_coding
from slipstream.job.exchange import AllReduce, AnyExchange, Local
from slipstream.job.servers import Server
from slipstream.plan.grid import Grid, Hardware, Style, micro_batches
from slipstream.plan.rates import Rates
from slipstream.plan.work import Number, Work


@dataclass(frozen=True)
class _Code:
    """What a codec makes of a matrix."""

    bytes: Callable[[Any, Number, Number, Number], Number]
    """Of its code, by the codec's settings, rows, columns and the bytes of a number that is not coded."""
    passes: Callable[[Any], float]
    """How often a gradient travels to or from memory while its code is made, summed and read, and what it leaves out is
    kept. By processor time on one core, beside a copy; on GPUs not measured, where the operations are the same."""


_CODES: dict[str, _Code] = {
    "fp16": _Code(lambda _, rows, columns, __: 2 * rows * columns, lambda c: 18 if c.feedback else 11),
    "bf16": _Code(lambda _, rows, columns, __: 2 * rows * columns, lambda c: 18 if c.feedback else 10),
    "int8": _Code(lambda c, rows, columns, _: (1 + 2 / c.block) * rows * columns, lambda c: 35 if c.feedback else 45),
    "onebit": _Code(lambda c, rows, columns, _: (1 / 8 + 2 / c.block) * rows * columns, lambda _: 54),
    "topk": _Code(
        lambda c, rows, columns, _: 3 * max(1, round(256 * c.part)) / 256 * rows * columns, lambda c: 40 + 250 * c.part
    ),
    "randomk": _Code(
        lambda c, rows, columns, exact: exact * rows * columns / round(1 / c.part), lambda c: 25 + 80 * c.part
    ),
    "powersgd": _Code(lambda c, rows, columns, exact: exact * c.rank * (rows + columns), lambda _: 45),
}
_MAKING = 3.0
"""Sizes of a bucket that its code takes while it is made: 1.0 (powersgd) to 3.7 (int8 among four workers)."""
_OUTER = (12.0, 5.0, 3.0, 5.0)
"""How often the weights travel for an exchange of local steps and its outer step, counted in `train/exchange/local.py`:
in any case, more for momentum, for Nesterov's, and for an overlap."""
_HOST_LINK = 25e9
"""Bytes a second between an accelerator and main memory: about what PCI Express 4.0 gives of its 31.5. Assumed."""
_HOST_MEMORY = 100e9
"""Bytes a second of main memory beside accelerators, where parameter servers live: half of what a socket with eight
channels has. Assumed."""
_SUMMED = 5.0
"""How often a gradient travels in a server's memory: it is copied, and added to the others."""

_ALLREDUCE = AllReduce()


@dataclass(frozen=True)
class Agreement:
    """How the workers of a job agree, as far as memory and time go. Of one worker nothing is asked."""

    setting: AnyExchange = _ALLREDUCE
    plainly: float = 0.0
    """Part of the run in which gradients travel as they are: the warm-up of a codec."""
    on_gpu: bool = True
    """Whether workers have memory of their own, apart from that of servers beside them."""

    def __str__(self) -> str:
        """As a job file says it, without what is so anyway; nothing for plain all-reduce."""
        setting = self.setting
        said = setting.model_dump(mode="json", exclude={"kind", "codec"}, exclude_defaults=True)
        if isinstance(setting, Local):
            said = {"every": setting.every, **said}
        codec = setting.codec.model_dump(mode="json", exclude_defaults=True) if setting.codec else {}
        parts = [
            *map(_said, said.items()),
            *([f"codec {codec.pop('name')}", *map(_said, codec.items())] if codec else []),
        ]
        return ", ".join([setting.kind, *parts]) if parts or setting.kind != "allreduce" else ""

    def admits(self, grid: Grid) -> Any:
        """Which layouts workers can agree on in this way; the others are refused where a job meets its plan (`fit.py`,
        `plan.py`)."""
        setting = self.setting
        if setting.kind != "allreduce" or setting.balance:
            return grid.replicate == grid.workers
        summed_here = setting.codec is not None or setting.algorithm not in ("auto", "backend")
        return (grid.sharded < 2) | (not summed_here)

    # --- memory ------------------------------------------------------------------------------------------------------

    def held(
        self, work: Work, grid: Grid, batch: Number, weights: Number, states: Number, style: Style
    ) -> dict[str, Number]:
        """Bytes by term, on a worker with so many weights. `states` are those of the optimiser for each weight."""
        setting, size = self.setting, style.stored_weight * weights
        if isinstance(setting, Server):
            return self._held_with_servers(setting, grid, size, 4 * states * weights)
        several = (grid.data * grid.context > 1) & (grid.sharded < 2)
        terms = {name: several * held for name, held in self._held_by_codes(work, grid, weights, style).items()}
        if isinstance(setting, Local):
            away = 1 + (setting.overlap > 0)
            outer = several * size * (setting.outer.momentum > 0)
            return terms | {"anchor": several * size, "outer": outer, "travelling": several * size * away}
        # Gradients of several micro-batches add up beside the buckets; those of one lie in them.
        return terms | {"buckets": several * size * (micro_batches(grid, batch) > 1)}

    def _held_by_codes(self, work: Work, grid: Grid, weights: Number, style: Style) -> dict[str, Number]:
        setting = self.setting
        if isinstance(setting, Server) or setting.codec is None:
            return {}
        codec, part = setting.codec, weights / _weights(work, grid)  # a stage's part of all
        coded = style.stored_weight * weights * _part_coded(codec, work, grid)
        largest = np.maximum(setting.bucket, style.stored_weight * _largest(work, grid))
        return {
            "unsent": 2 * coded * codec.feedback,
            "codes": coded * (not codec.feedback) + style.stored_weight * part * _directions(codec, work, grid),
            "making": _MAKING * np.minimum(coded, largest),
        }

    def _held_with_servers(self, setting: Server, grid: Grid, size: Number, state: Number) -> dict[str, Number]:
        """Beside accelerators servers and what passes to them are in main memory, which is not counted."""
        if self.on_gpu:
            return {}
        return {"travelling": size, "servers": served(setting, grid.workers, size, state) / grid.workers}

    # --- time --------------------------------------------------------------------------------------------------------

    def sent(self, work: Work, grid: Grid, style: Style) -> Number:
        """Bytes that stand for a gradient on the wire, on average over weights and over the run."""
        codec = self.setting.codec
        if codec is None:
            return style.gradient_bytes
        exact, code = np.asarray(style.gradient_bytes), _CODES[codec.name]
        small = exact * (1 - _part_coded(codec, work, grid))
        coded = sum(
            count * code.bytes(codec, rows, columns, exact) * is_worth_coding(codec, rows, columns)
            for rows, columns, count in _matrices(work, grid)
        )
        return self.plainly * exact + (1 - self.plainly) * (small + coded / _weights(work, grid))

    def coding(self, work: Work, grid: Grid, weights: Number, on: Hardware, rates: Rates, style: Style) -> Number:
        """Seconds of a step in which codes are made and read."""
        codec = self.setting.codec
        if codec is None:
            return 0.0
        moved = style.stored_weight * weights * _part_coded(codec, work, grid) * _CODES[codec.name].passes(codec)
        every = self.setting.every if isinstance(self.setting, Local) else 1
        alone = (grid.data * grid.context == 1) | (grid.sharded > 1)
        return np.where(alone, 0.0, (1 - self.plainly) * moved / (on.bandwidth * rates.bandwidth) / every)

    def of_local_steps(
        self, setting: Local, summing: Number, step: Number, update: Number, size: Number, speed: Number
    ) -> tuple[Number, Number]:
        """Seconds of a step in which workers of local steps wait for the others, and in which they update: one exchange
        in `every`, which travels while the next `overlap` are computed (Douillard et al. 2025, arXiv 2501.18512).
        `summing` is how long it travels, `step` what a step computes, `speed` that of memory."""
        outer = setting.outer
        has = (True, outer.momentum > 0, outer.nesterov, setting.overlap > 0)
        passes = sum(each for each, there in zip(_OUTER, has, strict=True) if there)
        waits = np.maximum(0, summing - setting.overlap * (step + update)) / setting.every
        scaled = 2 * size / speed  # gradients become those of a whole batch
        return waits, update + scaled + passes * size / speed / setting.every

    def of_servers(
        self, setting: Server, grid: Grid, on: Hardware, rates: Rates, size: Number, step: Number, moved: Number
    ) -> tuple[Number, Number]:
        """Seconds of a step that workers wait for servers, and that servers take to update.

        Every worker fetches and sends the whole model, and each of S servers passes on 1/S of that for all of W (Li et
        al. 2014, OSDI). sync: all wait for both and for the update. async: a batch is an update, so of W workers each
        is away for its own transfers in one of W updates, and the servers work while others compute; unless they are
        the slower. A bound on staleness lets fewer workers be under way. `moved` are the bytes of an update."""
        workers, servers = grid.workers, setting.servers
        memory = _HOST_MEMORY if self.on_gpu else on.bandwidth * rates.bandwidth
        own, theirs = self._ways(setting, grid, on, rates, memory)
        updating = (moved + _SUMMED * size * (workers if setting.mode == "sync" else 1)) / servers / memory
        if setting.mode == "sync":
            return 2 * np.maximum(size / own, workers * size / theirs), updating
        under_way = workers if setting.staleness is None else np.minimum(workers, setting.staleness + 1)
        away = 2 * size / own / workers
        cycle = (step + away) * workers / under_way
        busy = 2 * size / theirs + updating
        return np.maximum(cycle, busy) - step, np.zeros_like(busy)

    def _ways(self, setting: Server, grid: Grid, on: Hardware, rates: Rates, memory: Number) -> tuple[Number, Number]:
        """Bytes a second of a worker's way to the servers, and of all servers' together. On one machine it is a copy in
        main memory, for accelerators over their link to it; on several servers stand beside workers, one to each."""
        copy = memory / 2
        machines = np.ceil(grid.workers / on.per_node)
        network = on.network * rates.network
        within = np.minimum(copy, _HOST_LINK) if self.on_gpu else copy
        own = np.where(machines > 1, network / np.minimum(on.per_node, grid.workers), within)
        return own, np.where(machines > 1, network * np.minimum(setting.servers, machines), copy * setting.servers)


PLAIN = Agreement()
"""All-reduce without a codec."""


def served(setting: Server, workers: Number, size: Number, state: Number) -> Number:
    """Bytes that all servers hold together: weights, optimiser state, and of each worker a gradient until all are there
    (sync), or the weights it fetched last and, for a moment, those it fetches (compensation)."""
    copies = 1 if setting.mode == "sync" else 0 if setting.compensation is None else 2
    return size * (1 + copies * workers) + state


def _said(item: tuple[str, Any]) -> str:
    name, value = item
    if isinstance(value, dict):
        return f"{name} ({', '.join(map(_said, value.items()))})"
    return name if value is True else f"{name} {str(value).lower() if isinstance(value, bool) else value}"


def _matrices(work: Work, grid: Grid) -> list[tuple[Number, Number, Number]]:
    """Rows, columns and number of those that a tensor worker has, if it has all stages."""
    cut = np.asarray(grid.tensor, dtype=float)
    return [
        (each.n / cut if each.split == "n" else each.n, each.k / cut if each.split == "k" else each.k, each.count)
        for each in work.matrices
    ]


def _weights(work: Work, grid: Grid) -> Number:
    return work.parameters / grid.tensor


def _part_coded(codec: AnyCodec, work: Work, grid: Grid) -> Number:
    coded = sum(
        count * rows * columns * is_worth_coding(codec, rows, columns) for rows, columns, count in _matrices(work, grid)
    )
    return coded / _weights(work, grid)


def _largest(work: Work, grid: Grid) -> Number:
    """Numbers in the largest matrix, which is a bucket by itself where it is larger than one."""
    largest: Number = 0.0
    for rows, columns, _ in _matrices(work, grid):
        largest = np.maximum(largest, rows * columns)
    return largest


def _directions(codec: AnyCodec, work: Work, grid: Grid) -> Number:
    """Numbers of powersgd's directions: those in use, and with `warm` those for the next step."""
    if codec.name != "powersgd":
        return 0.0
    return (1 + codec.warm) * sum(
        count * codec.rank * columns * is_worth_coding(codec, rows, columns)
        for rows, columns, count in _matrices(work, grid)
    )
