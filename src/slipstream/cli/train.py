"""`slipstream train`: plan and run a job on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import AsJson


def command(
    job: Annotated[Path, typer.Argument(help="The job file.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: train.batch=64.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers. Default: one per GPU or CPU core.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of this run. Default: runs/NAME-1, -2, …")] = None,
    as_json: AsJson = False,
) -> None:
    """Train what a job file describes."""
    from slipstream import api
    from slipstream.cli.watching import watch

    watch(
        lambda watcher: api.train(job, settings=settings or (), workers=workers, run_dir=run_dir, watcher=watcher),
        as_json,
    )
