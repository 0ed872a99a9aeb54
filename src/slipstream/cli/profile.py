"""`slipstream profile`: where the time of a job's steps goes."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.options import AsJson

if TYPE_CHECKING:
    from slipstream.profiling import Spent


def command(
    job: Annotated[Path, typer.Argument(help="The job file.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: train.batch=64.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to look at.")] = 4,
    trace: Annotated[Path | None, typer.Option(help="Write all of it into FILE.json, for Perfetto.")] = None,
    as_json: AsJson = False,
) -> None:
    """Run a few steps of a job under the profiler, on one worker, and say where their time goes."""
    from slipstream.profiling import profile

    spent = profile(job, settings or [], steps, trace)
    if as_json:
        print(json.dumps(asdict(spent), indent=2))
        return
    _show(spent)
    if trace:
        print(f"the trace is in {trace}")


def _show(spent: "Spent") -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    console.print(f"a step takes {spent.step * 1e3:,.1f} ms, {spent.layout}, {spent.precision}", style="bold")
    table = Table("for", "ms", "part", "reaches", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, seconds in spent.kinds.items():
        if seconds > 0:
            table.add_row(kind, f"{seconds * 1e3:,.2f}", f"{seconds / spent.step:.0%}", _reached(spent, kind, seconds))
    console.print(table)
    longest = Table("longest", "for", "calls", "ms", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name, kind, calls, seconds in spent.kernels:
        longest.add_row(name if len(name) < 60 else f"{name[:57]}…", kind, f"{calls:,}", f"{seconds * 1e3:,.2f}")
    console.print(longest)


def _reached(spent: "Spent", kind: str, seconds: float) -> str:
    """The rate, and that beside what the machine can do."""
    done, most, unit = {
        "matrix": (spent.flops, spent.peak, "TFLOP/s"),
        "attention": (spent.attention_flops, spent.peak, "TFLOP/s"),
        "optimiser": (spent.update_bytes, spent.bandwidth, "TB/s"),
    }.get(kind, (0.0, None, ""))
    if not done:
        return ""
    rate = done / seconds
    return f"{rate / 1e12:,.3g} {unit}" + (f" of {most / 1e12:,.3g}" if most else "")
