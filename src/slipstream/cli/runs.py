"""`slipstream runs`: what there is."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from slipstream.cli.options import AsJson


def command(
    root: Annotated[Path, typer.Argument(help="The folder that holds the runs.")] = Path("runs"),
    as_json: AsJson = False,
) -> None:
    """List runs."""
    from slipstream.cli.summary import summarise
    from slipstream.runs import find_runs

    rows: list[dict[str, Any]] = [summarise(run) for run in find_runs(root)]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print(f"no runs in {root}/ yet; `slipstream train JOB` makes one")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("run", "status", "step", "loss", "validation", "seconds"):
        table.add_column(column, justify="left" if column in ("run", "status") else "right")
    for row in rows:
        table.add_row(
            row["run"], row["status"], f"{row['step']:,}", _number(row["loss"]), _number(row["val_loss"]),
            f"{row['seconds']:,.0f}",
        )  # fmt: skip
    Console().print(table)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"
