"""`slipstream verify`: is this layout right for this job?"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import AsJson, layout_settings


def command(
    job: Annotated[Path, typer.Argument(help="The job file.")],
    layout: Annotated[str, typer.Option(help="The layout to verify: tensor=2,pipeline=2.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: train.batch=64.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train a shrunken copy of a job on one worker and on a layout, and compare loss, gradient norm and weights."""
    from rich.console import Console
    from rich.table import Table

    from slipstream.api import LateRefusal
    from slipstream.job import load_job, locate
    from slipstream.verify import TOLERANCE, verify

    wanted = [*(settings or []), *layout_settings(layout)]
    try:
        verdict = verify(load_job(job, wanted))
    except LateRefusal as error:
        raise locate(error, job, wanted) from error
    if as_json:
        print(json.dumps({**asdict(verdict), "passed": verdict.passed}, indent=2))
    else:
        table = Table("largest relative difference", "", box=None, padding=(0, 2))
        for name in ("loss", "grad_norm", "weights"):
            table.add_row(name.replace("grad_norm", "gradient norm"), f"{getattr(verdict, name):.1e}")
        console = Console(highlight=False)
        console.print(f"{verdict.layout}: {verdict.steps} steps in fp64 beside one worker's")
        console.print(table)
        console.print("[green]pass[/]" if verdict.passed else f"[red]fail[/]: more than {TOLERANCE:.0e}")
    raise typer.Exit(0 if verdict.passed else 1)
