"""Training over slow and long links: how soon each exchange and codec reaches the loss that torch's DDP ends with.

Four hosts are network namespaces of this machine (`network.py`), one worker on each, and one server where there are
servers. All sides train the same decoder
of about ten million parameters on the text of Python's own library, from the same weights, on the same samples, with
the same optimiser at a constant rate: ours through the real workers and loop, DDP through `peers/ddp_net.py`. The
clock starts when a side has built its model, and runs on while it judges. DDP comes first and trains for `--steps`; the
others go on until they reach the loss that it ends with, between two judgements by a straight line, or until the limit.
Bytes are those that the first host's interface has sent by then.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from common import RESULTS, console, facts, save, show
from network import Network, hosts, missing
from slipstream.data import prepare
from slipstream.fleet.scratch import Scratch
from slipstream.fleet.workers import KEEP_MEMORY
from slipstream.job import Job, dump
from slipstream.job.servers import Server
from slipstream.plan import make_plan, this_machine
from slipstream.runs import RunFolder, create_pulse, read_lines, write_yaml

HOSTS = 4
LINKS: dict[str, dict[str, Any]] = {
    "100 Mbit/s": {"rate": "100mbit"},
    "1 Gbit/s": {"rate": "1gbit"},
    "unlimited": {},
    "5 ms": {"delay": 0.005},
    "25 ms": {"delay": 0.025},
}
PEERS = {"ddp": "plain", "ddp + fp16": "fp16", "ddp + powersgd": "powersgd"}
"""torch's, by the name of their hook."""
ONEBIT = {"name": "onebit", "warmup": 0}
OURS: dict[str, dict[str, Any]] = {
    "allreduce": {"algorithm": "backend"},
    "allreduce auto": {"algorithm": "auto"},
    "fp16": {"codec": "fp16"},
    "bf16": {"codec": "bf16"},
    "int8": {"codec": "int8"},
    "onebit": {"codec": ONEBIT},
    "topk": {"codec": {"name": "topk", "part": "10%", "warmup": 0}},
    "randomk": {"codec": {"name": "randomk", "part": "10%", "warmup": 0}},
    "powersgd": {"codec": {"name": "powersgd", "warmup": 0}},
    "local": {"kind": "local", "every": 16, "overlap": 12},
    "local + int8": {"kind": "local", "every": 8, "overlap": 3, "codec": "int8"},
    "local + onebit": {"kind": "local", "every": 8, "codec": ONEBIT},
    "server": {"kind": "server", "servers": HOSTS},
    "server async": {"kind": "server", "servers": HOSTS, "mode": "async", "staleness": HOSTS},
}
"""Exchanges as a job file has them."""
JOB: dict[str, Any] = {
    "name": "net",
    "model": {"kind": "decoder", "layers": 6, "hidden": 320, "heads": 5},
    "data": {"source": "python-stdlib", "sequence": 16, "vocabulary": 8192, "validation": "0.02%"},
    "train": {
        "batch": 8,
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"decay": "constant", "warmup": "128 samples"},
        "evaluate": {"every": 8, "samples": 64},
    },
    "machines": {"device": "cpu"},
    "layout": {"replicate": HOSTS},
    "checkpoint": {"every": "100%"},
}
SHORT: dict[str, Any] = {"model": {"kind": "decoder", "layers": 1, "hidden": 32, "heads": 2}}
SHORT |= {"data": {**JOB["data"], "vocabulary": 300}}


ROUNDING = 1e-5
"""Part of a loss by which sides that add up in another order may differ after the same steps."""


@dataclass
class Curve:
    """What one side did over one link."""

    began: float = 0.0
    first: int = 0
    """Bytes that were sent before the first step."""
    points: list[tuple[float, int, float, int]] = field(default_factory=list)
    """Seconds, step, loss on held-out samples, bytes sent."""

    def reached(self, target: float) -> tuple[float, float, float] | None:
        """Seconds, steps and bytes until this loss, by a straight line between two judgements."""
        for before, after in zip([None, *self.points], self.points, strict=False):
            if after[2] <= target:
                if before is None:
                    return after[0], after[1], after[3]
                part = (before[2] - target) / (before[2] - after[2])
                seconds, step, sent = (before[n] + part * (after[n] - before[n]) for n in (0, 1, 3))
                return seconds, step, sent
        return None


def train(side: str, link: str, steps: int, target: float | None, limit: float, short: bool, root: Path) -> Curve:
    """One side over one link, to its end, the target or the limit."""
    values = JOB | (SHORT if short else {})
    values = {**values, "train": {**values["train"], "steps": steps}, "exchange": OURS.get(side, {})}
    job = Job.model_validate(values)
    prepare(job, lambda _: None)
    run = RunFolder.create(Path(tempfile.mkdtemp(dir=root)) / "run", dump(job))
    write_yaml(run.plan, make_plan(job, this_machine(), HOSTS).model_dump(mode="json"))
    scratch = Scratch.create()
    run.event("launch", workers=HOSTS, spent=0.0, folder=str(root), scratch=str(scratch.path), restore=None)
    ranks = HOSTS + (job.exchange.servers if isinstance(job.exchange, Server) else 0)
    create_pulse(scratch.pulse, ranks)
    peer = [str(Path(__file__).parent / "peers/ddp_net.py")]
    program, more = (peer, [PEERS[side]]) if side in PEERS else (["-m", "slipstream.fleet.worker"], [])
    environment = {**KEEP_MEMORY, "OMP_NUM_THREADS": "1", "SLIPSTREAM_NODES": ",".join(map(str, range(HOSTS)))}
    environment["SLIPSTREAM_TOKEN"] = "a word that they know"
    try:
        with hosts(HOSTS, **LINKS[link]) as network, (run.logs / "all.log").open("wb") as log:
            environment["SLIPSTREAM_SERVERS"] = ",".join(f"{address}:7000" for address in network.addresses)
            processes = [
                network.start(
                    rank % HOSTS,
                    [sys.executable, *program, str(run.path), str(rank), str(HOSTS), str(scratch.path), *more],
                    environment,
                    stdin=subprocess.PIPE,  # workers end with it
                    stdout=log,
                    stderr=log,
                )
                for rank in range(ranks)
            ]
            return watch(side, run, network, processes, target, limit)
    finally:
        scratch.remove()


def watch(
    side: str, run: RunFolder, network: Network, processes: list[Any], target: float | None, limit: float
) -> Curve:
    """Look at what is written, until it is enough."""
    curve, known, sent = Curve(), 0, network.sent(0)
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            logs = "".join(path.read_text()[-2000:] for path in sorted(run.logs.iterdir()))
            console.print(f"{side} failed, and the others go on:\n{logs}")
            return curve
        if not curve.began and any(event["event"] == "build" for event in read_lines(run.events)):
            curve.began, curve.first = time.monotonic(), sent  # at the look before: a short run may be over by now
        if not curve.began:
            sent = network.sent(0)
        lines = list(read_lines(run.metrics))
        judged = [line for line in lines[known:] if "val_loss" in line]
        known = len(lines)
        for line in judged:
            seconds = time.monotonic() - curve.began
            curve.points.append((seconds, line["step"], line["val_loss"], network.sent(0) - curve.first))
        if curve.began and time.monotonic() - curve.began > limit:
            break
        if target is not None and curve.reached(target):
            break
        time.sleep(0.02)
    return curve


def summarise(side: str, link: str, curve: Curve, target: float, plain: tuple[float, float, float]) -> dict[str, Any]:
    tokens = JOB["train"]["batch"] * JOB["data"]["sequence"]
    seconds, steps, loss, sent = curve.points[-1] if curve.points else (0.0, 0, float("inf"), 0)
    there = curve.reached(target)
    return {
        "link": link,
        "side": side,
        "seconds": there and round(there[0], 2),
        "steps": there and round(there[1], 1),
        "bytes": there and round(there[2]),
        "sooner": there and round(plain[0] / there[0], 2),
        "fewer_bytes": there and round(plain[2] / there[2], 2),
        "bytes_per_step": round(sent / max(1, steps)),
        "tokens_per_s": round(steps * tokens / max(1e-9, seconds), 1),
        "last_loss": loss,
        "curve": [(round(point[0], 3), *point[1:]) for point in curve.points],
    }


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Loss over time, a picture for each link."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    links = list(dict.fromkeys(row["link"] for row in rows))
    colours = {side: colormaps["tab20"](number) for number, side in enumerate([*PEERS, *OURS])}
    figure = Figure(figsize=(10, 4.5 * len(links)), dpi=120, layout="tight")
    for axes, link in zip(figure.subplots(len(links), squeeze=False)[:, 0], links, strict=True):
        for row in (row for row in rows if row["link"] == link and row["curve"]):
            seconds, _, losses, _ = zip(*row["curve"], strict=True)
            line = "--" if row["side"] in PEERS else "-"
            axes.plot(seconds, losses, label=row["side"], color=colours[row["side"]], linestyle=line, marker=".")
        axes.set(xscale="log", xlabel="seconds", ylabel="loss on held-out samples", title=link)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)
    console.print(f"drawn to {path}", style="dim")


def compare(link: str, sides: list[str], options: argparse.Namespace, root: Path) -> list[dict[str, Any]]:
    """All sides over one link."""
    first = train("ddp", link, options.steps, None, options.limit, options.short, root)
    if not first.points:
        raise SystemExit("without ddp there is nothing to compare with")
    target = first.points[-1][2] * (1 + ROUNDING)
    plain = first.reached(target)
    assert plain, "its own last loss"
    rows = [summarise("ddp", link, first, target, plain)]
    for side in (side for side in sides if side != "ddp"):
        curve = train(side, link, options.more * options.steps, target, options.limit, options.short, root)
        rows.append(summarise(side, link, curve, target, plain))
        console.print(json.dumps({key: value for key, value in rows[-1].items() if key != "curve"}), style="dim")
    return rows


def show_link(link: str, rows: list[dict[str, Any]]) -> None:
    def figure(value: float | None, form: str) -> str:
        return "–" if value is None else format(value, form)

    forms = {"seconds": ",.1f", "steps": ",.0f", "sooner": ".2f", "fewer_bytes": ".1f"}
    forms |= {"bytes_per_step": ",", "tokens_per_s": ",.0f", "last_loss": ".4f"}
    show(
        f"{link}: until the loss that ddp ends with",
        ["side", "seconds", "steps", "times sooner", "times fewer bytes", "bytes a step", "tokens/s", "last loss"],
        [[row["side"], *(figure(row[key], form) for key, form in forms.items())] for row in rows],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--short", action="store_true", help="a tiny model for a few steps, to see that it works")
    parser.add_argument("--links", default=",".join(LINKS), help=f"some of: {', '.join(LINKS)}")
    parser.add_argument("--sides", default=",".join([*PEERS, *OURS]), help="some of the sides; ddp always runs")
    parser.add_argument("--steps", type=int, default=96, help="of ddp; default: 96")
    parser.add_argument("--more", type=int, default=4, help="others may take so many times its steps; default: 4")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds of training for each side; default: 600")
    parser.add_argument("--out", type=Path, default=RESULTS / "exchange_net.json")
    options = parser.parse_args()
    if reason := missing():
        raise SystemExit(f"no hosts: {reason}")
    for words, known in ((options.links, LINKS), (options.sides, PEERS | OURS)):
        if unknown := set(words.split(",")) - set(known):
            parser.error(f"{', '.join(sorted(unknown))}: not one of {', '.join(known)}")
    options.steps = 16 if options.short else options.steps
    record, rows = facts(), []
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        for link in options.links.split(","):
            found = compare(link, options.sides.split(","), options, Path(folder))
            show_link(link, found)
            rows += found
    settings = {"job": JOB | (SHORT if options.short else {}), "sides": OURS, "steps": options.steps, "hosts": HOSTS}
    save(options.out, {**record, "settings": settings, "results": rows})
    draw(rows, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
