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
    trace: Annotated[Path, typer.Option(help="Where to write all of it, for Perfetto (ui.perfetto.dev).")] = Path(
        "trace.json"
    ),
    as_json: AsJson = False,
) -> None:
    """Run a few steps of a job under the profiler, on one worker, and say where their time goes."""
    from slipstream.profiling import profile

    spent = profile(job, trace, settings or [], steps)
    if as_json:
        print(json.dumps(asdict(spent), indent=2))
        return
    _show(spent)
    if spent.peak is None:
        print("`slipstream probe` measures what this machine could reach, to be shown beside it")
    print(f"all of it is in {trace}, for Perfetto")


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
        "matrix": (spent.flops, spent.peak, "FLOP/s"),
        "attention": (spent.attention_flops, spent.peak, "FLOP/s"),
        "optimiser": (spent.update_bytes, spent.bandwidth, "B/s"),
    }.get(kind, (0.0, None, ""))
    if not done:
        return ""
    rate = done / seconds
    size, prefix = (1e12, "T") if max(rate, most or 0.0) >= 1e12 else (1e9, "G")
    return f"{rate / size:,.3g} {prefix}{unit}" + (f" of {most / size:,.3g}" if most else "")
