"""What a person sees of a run: the plan, a live bar, and what came of it."""

import json
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from slipstream.job import Job, dump
from slipstream.job.models import PRESETS
from slipstream.plan import Plan
from slipstream.plan.exchange import Agreement
from slipstream.runs import RunFolder, read_lines
from slipstream.runs.result import Result


class Screen:
    """A watcher who draws on the terminal; where there is none, a line now and then."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._price: float | None = None
        self.run: RunFolder | None = None
        self._spoke = time.monotonic()

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(text, style="yellow" if text.startswith("warning") else "dim", markup=False)

    def started(self, run: RunFolder, job: Job, plan: Plan, since_start: bool = False) -> None:
        """Show the plan that will be run; `since_start`, also what has come of it so far."""
        self.run, self._job = run, job
        self._price = job.machines.price_per_hour
        self._began, self._spent_before = time.monotonic(), run.seconds_spent()
        self._metrics, self._events = Tail(run.metrics, since_start), Tail(run.events, since_start)
        self.console.print(plan_table(run, job, plan))

    def tick(self) -> None:
        """Move the bar to where the run is."""
        for event in self._events.new_lines():
            if event["event"] == "build":
                self._begin(event)
            elif event["event"] == "network":
                self.say(_network_in_words(event))
            elif event["event"] == "adding up":
                self.say(_ways_in_words(event["ways"]))
            elif event["event"] == "warning":
                self.say(f"warning: {event['text']}")
            elif event["event"] == "restart":
                self.say(f"warning: {_restart_in_words(event)}")
        for line in self._metrics.new_lines():
            self._advance(line)

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._bar is not None:
            self.tick()
            self._bar.stop()
            self._bar = None

    def _begin(self, build: dict[str, Any]) -> None:
        if self._bar is not None:  # servers were started again
            return
        self.say(f"{build['parameters']:,} parameters, {build['steps']:,} steps, {build['samples']:,} samples")
        columns = (
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._bar = Progress(
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"), *columns, console=self.console, expand=True
        )
        self._task = self._bar.add_task("starting", total=build["steps"])
        if self.console.is_terminal:
            self._bar.start()

    def _advance(self, line: dict[str, Any]) -> None:
        assert self._bar is not None and self._task is not None, "the build event comes before the first step"
        self._bar.update(self._task, completed=line["step"], description=self._describe(line))
        if "val_loss" in line:
            accuracy = f", accuracy {line['val_accuracy']:.1%}" if "val_accuracy" in line else ""
            self.console.print(f"step {line['step']:>6,}   validation loss {number(line['val_loss'])}{accuracy}")
        elif not self.console.is_terminal and time.monotonic() - self._spoke > 10:
            self._spoke = time.monotonic()
            self.say(f"step {line['step']:>6,}   {self._describe(line)}")

    def _describe(self, line: dict[str, Any]) -> str:
        loss = number(line["loss"])
        unit = "tokens/s" if self._job.on_text else "samples/s"
        return f"loss {loss}  {line['tokens_per_s']:,.0f} {unit}{self._cost()}"

    def _cost(self) -> str:
        """Cost so far and to the end, where the machine has a price."""
        if self._price is None or self._bar is None or self._task is None:
            return ""
        spent = self._spent_before + time.monotonic() - self._began
        left = self._bar.tasks[0].time_remaining or 0.0
        return f"  ${spent / 3600 * self._price:.2f} of ${(spent + left) / 3600 * self._price:.2f}"


def _network_in_words(event: dict[str, Any]) -> str:
    links = f"links between machines: {event['latency'] * 1e3:.3g} ms, {event['bandwidth'] / 1e6:,.3g} MB/s"
    seconds = max(1.0, event["seconds"])
    return f"{links}; which way of adding up is the quickest is tried now, for about {seconds:.0f} s"


def _ways_in_words(ways: dict[str, str]) -> str:
    """With the sizes of buckets, where these decide."""
    if len(set(ways.values())) == 1:
        return f"gradients are added up by {next(iter(ways.values()))}"
    return "gradients are added up by " + ", ".join(f"{way} ({int(size) / 1e6:,.3g} MB)" for size, way in ways.items())


def _restart_in_words(event: dict[str, Any]) -> str:
    if "servers" not in event:
        return f"worker {event['rank']} was killed, and is started again"
    which = "the server" if event["servers"] == 1 else f"one of {event['servers']} servers"
    return f"{which} was killed: all go on from step {event['step']}"


def number(value: float | None) -> str:
    """A loss in a few digits."""
    return "not finite" if value is None else f"{value:.4f}"


class Tail:
    """New lines of a growing JSON-lines file."""

    def __init__(self, path: Path, from_start: bool = False) -> None:
        self._path = path
        self._offset = path.stat().st_size if path.exists() and not from_start else 0
        self._file: int | None = None

    def new_lines(self) -> list[dict[str, Any]]:
        """What was written since the last call, in whole lines."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            found = os.fstat(file.fileno())
            if self._file not in (None, found.st_ino):  # steps were taken back: what is left is known
                self._offset = found.st_size
            self._file = found.st_ino
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def plan_table(run: RunFolder, job: Job, plan: Plan) -> Table:
    """The plan, in words."""
    length = next(
        f"{int(value) if value == int(value) else value:,} {name}"
        for name in job.train.LENGTHS
        if (value := getattr(job.train, name))
    )
    table = Table(title="plan", title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    data = dump(job)["data"]
    source = next(data[key] for key in ("source", "prepared", "import") if key in data)
    if isinstance(source, dict):
        source = " + ".join(f"{weight:g} × {name}" for name, weight in source.items())
    for word, meaning in (
        ("machine", plan.machine),
        ("model", _model_in_words(job)),
        ("data", f"{source}, for {job.task.kind}"),
        ("length", f"{length}, in batches of {job.train.batch:,}"),
        ("layout", f"{plan.layout}, {plan.threads} thread{'s' if plan.threads > 1 else ''} each on {plan.device}"),
        ("precision", plan.precision),
        ("exchange", str(Agreement(job.exchange))),
        ("run", str(run.path)),
    ):
        if meaning:
            table.add_row(word, meaning)
    return table


def _model_in_words(job: Job) -> str:
    """The kind or preset, and what was set beside it."""
    model = job.model.model_dump(by_alias=True, exclude_defaults=True)
    name = model.pop("preset", None) or job.model.kind
    usual = PRESETS.get(name, {})
    own = {key: value for key, value in model.items() if key not in ("kind", "args") and usual.get(key) != value}
    words = [f"{key} {_plain(value)}" if key != job.model.kind else _plain(value) for key, value in own.items()]
    return ", ".join([name, *words])


def _plain(value: Any) -> str:
    return " × ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


_WAITS = 0.05
"""Part of the time from which on waiting for data is worth a word."""


def show_result(console: Console, run: RunFolder, result: Result) -> None:
    """What came of it, and what to do next."""
    first = next(read_lines(run.metrics))["loss"]
    if result.sample is not None:
        console.rule("what it writes now", style="dim")
        console.print(result.sample, markup=False)
        console.rule(style="dim")
    loss, start = number(result.loss), number(first)
    judged = "" if result.val_loss is None else f", validation {result.val_loss:.4f}"
    judged += "" if result.val_accuracy is None else f", accuracy {result.val_accuracy:.1%}"
    cost = "" if result.cost is None else f" and ${result.cost:.2f}"
    skipped = f", {result.skipped} updates skipped" if result.skipped else ""
    why = "" if result.status == "finished" else f" ({result.reason})"
    if result.data_wait and result.data_wait > _WAITS:
        console.print(f"{result.data_wait:.0%} of the time was spent waiting for data", style="yellow")
    if result.compression and result.compression > 1:
        console.print(
            f"each worker sent {result.sent:,} bytes a step, {result.compression:.1f} times fewer than gradients "
            "as they are in every step",
            style="dim",
        )
    if result.staleness:
        late = {int(updates): count for updates, count in result.staleness.items()}
        mean = sum(updates * count for updates, count in late.items()) / sum(late.values())
        console.print(f"gradients came {mean:.1f} updates late on average, {max(late)} at most", style="dim")
    console.print(
        f"[bold]{result.status}[/]{why} after {result.step:,} steps in {result.seconds:.0f} s{cost}: "
        f"loss {start} → {loss}{judged}{skipped}"
    )


def show_next(console: Console, run: RunFolder, result: Result) -> None:
    """The commands to try next."""
    commands = {
        f"slipstream show {run.path}": "what it did, step by step",
        "slipstream init classification": "a commented job file, to change into your own",
        "slipstream runs": "all runs so far",
    }
    if result.status == "stopped":
        commands = {f"slipstream resume {run.path}": "go on from here"}
    else:
        console.print(f"curve: {run.curve}", markup=False, soft_wrap=True)
        console.print(f"weights: {result.export}", markup=False, soft_wrap=True)
    console.print("next:", style="bold")
    width = max(map(len, commands))
    for command, meaning in commands.items():
        console.print(f"  {command:<{width}}   # {meaning}", markup=False, soft_wrap=True)
