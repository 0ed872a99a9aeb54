"""Ways of adding up gradients, over links that are quick or long: ours, gloo's own, and which of them `auto` takes.

Hosts are network namespaces of this machine (`network.py`). Sides take turns at every size; all workers begin at the
same moment, and a sum has taken as long as the last of them; the median of the rounds counts, and half of them lie
between the quartiles. All sides have as many rounds, after one to warm up: until the standard error of every side's
median is 2% of it or less, or the sums of a size have taken `--seconds`; five at least and 400 at most. `auto` runs the
code of what it chooses, so its figure is that side's; it has tried what it takes for a run whose buckets have these
sizes.
"""

import argparse
import math
import multiprocessing as mp
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import RESULTS, Stolen, alternate, console, facts, save, show
from network import Network, hosts, missing
from slipstream.fleet.workers import KEEP_MEMORY

SIDES = ("gloo", "ring", "tree", "halving-doubling", "hierarchical")
KB, MB = 2**10, 2**20
LEAST, MOST = 5, 400
"""Rounds of each side: with fewer, the best is whichever was lucky."""
KNOWN = 0.02
"""Standard error of a median, as a part of it, that is small enough to see 5% between two."""
RATIOS = ("auto_to_best", "auto_to_best_by_best_rounds", "auto_to_gloo", "ring_to_tree")


@dataclass(frozen=True)
class Case:
    """One network and what is added up over it."""

    hosts: int
    workers: int
    """On each host."""
    delay: float
    sizes: tuple[int, ...]
    seconds: float
    """Of sums, for each size, at most, unless the fewest rounds take longer; none: one round, to see that it works."""
    steps: float
    """Of the run for which `auto` chooses; a trial takes the longer the longer that is."""

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(host for host in range(self.hosts) for _ in range(self.workers))

    @property
    def sides(self) -> list[str]:
        """With one worker to a host two levels are one."""
        return [side for side in SIDES if side != "hierarchical" or self.workers > 1]

    def __str__(self) -> str:
        links = f"{self.delay * 1e3:g} ms delay" if self.delay else "unlimited"
        return f"{self.hosts} hosts × {self.workers}, {links}"


@dataclass
class Meeting:
    """Where the processes of a case meet, beside the network that they measure."""

    barrier: Any
    begin: Any
    ends: Any


def measure(case: Case) -> dict[str, Any]:
    """Seconds of every side and size, and what `auto` knows and takes."""
    context = mp.get_context("fork")  # torch is imported once
    size = len(case.nodes)
    meeting = Meeting(context.Barrier(size), context.Value("d"), context.Array("d", size))
    results, stolen = context.SimpleQueue(), Stolen()
    with hosts(case.hosts, delay=case.delay) as network, tempfile.TemporaryDirectory(prefix="bench-") as folder:
        store = f"file://{folder}/store"
        arguments = [(case, rank, network, store, meeting, results) for rank in range(size)]
        processes = [context.Process(target=work, args=each, daemon=True) for each in arguments]
        for process in processes:
            process.start()
        try:
            while results.empty():
                if any(process.exitcode for process in processes):
                    raise SystemExit(f"{case}: a worker has failed")
                time.sleep(0.05)
            found: dict[str, Any] = results.get()
        finally:
            for process in processes:
                process.kill()
                process.join()
    return {**found, "stolen": stolen.part}


def work(case: Case, rank: int, network: Network, store: str, meeting: Meeting, results: Any) -> None:
    """One worker."""
    network.enter(case.nodes[rank])
    import torch
    import torch.distributed as dist

    from slipstream.train.exchange.adding import ALGORITHMS
    from slipstream.train.exchange.adding.choose import choose
    from slipstream.train.exchange.adding.timing import time_ways, trials_of
    from slipstream.train.network import measure as measure_network

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=len(case.nodes))
    known = measure_network(case.nodes)
    began = time.monotonic()
    trials = trials_of(case.sizes, case.steps, known)
    known = known.model_copy(update={"sums": time_ways(known, ALGORITHMS, trials, lambda: True)})
    took = time.monotonic() - began
    chosen = {size: choose(size, case.nodes, known) for size in case.sizes}
    seconds: dict[int, dict[str, list[float]]] = {}
    for size in case.sizes:
        seconds[size] = {side: [] for side in case.sides}
        adders = {side: _adder(side, case) for side in case.sides}
        for side in _turns(case.sides, seconds[size], case.seconds):
            flat = torch.ones(size // 4)
            seconds[size][side].append(_time(adders[side], flat, rank, meeting))
            assert flat[0] == flat[-1] == len(case.nodes), f"{side} does not add up"
    if rank == 0:
        results.put({"network": known.model_dump(), "trying": took, "chosen": chosen, "seconds": seconds})
    meeting.barrier.wait()


def _adder(side: str, case: Case) -> Any:
    import torch.distributed as dist

    from slipstream.train.exchange.adding import ALGORITHMS
    from slipstream.train.exchange.adding.backend import Backend
    from slipstream.train.exchange.adding.links import Links, PointToPoint

    group = dist.group.WORLD
    assert group is not None, "it was made"
    return Backend(group) if side == "gloo" else PointToPoint(ALGORITHMS[side], Links(group, case.nodes))


def _turns(sides: list[str], seconds: dict[str, list[float]], most: float) -> Iterator[str]:
    """A first round to warm up, then those that count: what the times so far say is the same for all workers."""
    yield from sides
    for times in seconds.values():
        times.clear()
    for side in alternate(sides, MOST):
        if len({len(times) for times in seconds.values()}) == 1 and _enough(list(seconds.values()), most):
            return
        yield side


def _enough(seconds: list[list[float]], most: float) -> bool:
    rounds = len(seconds[0])
    if rounds < LEAST:
        return rounds > 0 and not most
    return sum(map(sum, seconds)) >= most or max(map(uncertainty, seconds)) <= KNOWN


def _time(adder: Any, flat: Any, rank: int, meeting: Meeting) -> float:
    if rank == 0:
        meeting.begin.value = time.monotonic() + 0.01
    meeting.barrier.wait()
    time.sleep(max(0.0, meeting.begin.value - time.monotonic()))
    adder.start(flat).wait()
    meeting.ends[rank] = time.monotonic()
    meeting.barrier.wait()
    seconds: float = max(meeting.ends) - meeting.begin.value
    meeting.barrier.wait()  # before anybody begins anew
    return seconds


def summarise(case: Case, found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for size in case.sizes:
        times, chosen = found["seconds"][size], found["chosen"][size]
        auto = "gloo" if chosen == "backend" else chosen
        median = {side: statistics.median(each) for side, each in times.items()}
        best = {side: min(each) for side, each in times.items()}
        rows.append(
            {
                "case": str(case),
                "bytes": size,
                "seconds": {side: round(value, 6) for side, value in median.items()},
                "quartiles": {side: [round(value, 6) for value in quartiles(each)] for side, each in times.items()},
                "uncertainty": {side: round(uncertainty(each), 4) for side, each in times.items()},
                "best_round": {side: round(value, 6) for side, value in best.items()},
                "rounds": len(times["gloo"]),
                "auto": chosen,
                "auto_to_best": round(min(median.values()) / median[auto], 3),
                "auto_to_best_by_best_rounds": round(min(best.values()) / best[auto], 3),
                "auto_to_gloo": round(median["gloo"] / median[auto], 3),
                "ring_to_tree": round(median["ring"] / median["tree"], 3),
                "latency": found["network"]["latency"],
                "bandwidth": found["network"]["bandwidth"],
                "tried": found["network"]["sums"],
                "trying": round(found["trying"], 2),
                "stolen": found["stolen"],
            }
        )
    return rows


def quartiles(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return ordered[len(times) // 4], ordered[3 * len(times) // 4]


def uncertainty(times: list[float]) -> float:
    """The standard error of the median, as a part of it: 1.25 σ/√n, where 1.35 σ lie between the quartiles."""
    low, high = quartiles(times)
    return 1.25 / 1.35 * (high - low) / math.sqrt(len(times)) / statistics.median(times)


def show_case(case: Case, rows: list[dict[str, Any]]) -> None:
    first = rows[0]
    links = f"{first['latency'] * 1e3:.2f} ms, {first['bandwidth'] / 1e6:.0f} MB/s"
    console.print(f"measured at the start: {links}; ways were tried for {first['trying']:.1f} s")
    console.print(f"time that others took of the processors: {first['stolen']:.1%}")
    show(
        f"{case}: ms of a sum, the median of some rounds (and what lies between the quartiles, as a part of it)",
        ["size", *case.sides, "rounds", "auto takes", "best / auto", "by best rounds", "gloo / auto", "ring / tree"],
        [
            [
                f"{row['bytes'] // KB} KB" if row["bytes"] < MB else f"{row['bytes'] // MB} MB",
                *(f"{row['seconds'][side] * 1e3:.1f} ({_spread(row, side):.0%})" for side in case.sides),
                str(row["rounds"]),
                row["auto"],
                *(f"{row[name]:.2f}" for name in RATIOS),
            ]
            for row in rows
        ],
    )


def _spread(row: dict[str, Any], side: str) -> float:
    low, high = row["quartiles"][side]
    return float((high - low) / row["seconds"][side])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="few hosts, small sizes, one round, to see that it works")
    parser.add_argument("--seconds", type=float, default=30.0, help="of sums, for each size and network; default: 30")
    parser.add_argument("--hosts", default="8x1,4x2", help="hosts and workers on each; default: 8x1,4x2")
    parser.add_argument("--delays", default="0,0.005,0.025", help="seconds; default: 0,0.005,0.025")
    parser.add_argument("--kilobytes", default="1,4,64,1024,8192,65536", help="sizes; default: 1 KB to 64 MB")
    parser.add_argument("--steps", type=int, default=10_000, help="of the run that `auto` is for; default: 10,000")
    parser.add_argument("--out", type=Path, default=RESULTS / "allreduce.json")
    options = parser.parse_args()
    if not KEEP_MEMORY.items() <= os.environ.items():  # as the workers of a run have it; it counts from the start only
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEEP_MEMORY})
    if reason := missing():
        raise SystemExit(f"no hosts: {reason}")
    sizes = (KB, 64 * KB) if options.short else tuple(int(each) * KB for each in options.kilobytes.split(","))
    shapes = [(2, 2)] if options.short else [tuple(map(int, each.split("x"))) for each in options.hosts.split(",")]
    delays = [0.0, 0.002] if options.short else [float(each) for each in options.delays.split(",")]
    seconds = 0.0 if options.short else options.seconds
    import slipstream.train.loop  # noqa: F401  (before processes fork)

    os.environ["OMP_NUM_THREADS"] = "1"
    record: dict[str, Any] = facts()
    record["results"] = []
    for count, workers in shapes:
        for delay in delays:
            case = Case(count, workers, delay, sizes, seconds, 0 if options.short else options.steps)
            rows = summarise(case, measure(case))
            show_case(case, rows)
            record["results"] += rows
            save(options.out, record)  # at once: the next network may not end


if __name__ == "__main__":
    main()
