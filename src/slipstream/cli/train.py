"""`slipstream train`: plan and run a job on this machine."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.held import show_held
from slipstream.cli.options import AsJson, layout_settings


def command(
    job: Annotated[Path, typer.Argument(help="The job file.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: train.batch=64.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="How to split: shard=2,tensor=2. As --set layout.shard=2 …")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="A plan that `slipstream plan --save` has written: its layout and precision.")
    ] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Workers. Default: one per GPU or CPU core.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of this run. Default: runs/NAME-1, -2, …")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only build one rank, without memory, and count.")] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Which rank to build in a dry run. Default: 0.")] = None,
    as_json: AsJson = False,
) -> None:
    """Train what a job file describes."""
    from slipstream import api
    from slipstream.cli.watching import watch

    if plan and layout:
        raise typer.BadParameter("--plan has a layout already; give one of --plan and --layout")
    wanted = [*(settings or []), *layout_settings(layout), *(api.settings_of(plan, anywhere=dry_run) if plan else [])]
    if dry_run:
        if run_dir:
            raise typer.BadParameter("--run-dir has no effect in a dry run, which writes nothing")
        show_held(api.dry_run(job, settings=wanted, workers=workers, rank=rank or 0), as_json)
        return
    if rank is not None:
        raise typer.BadParameter("--rank has no effect without --dry-run")
    watch(lambda watcher: api.train(job, settings=wanted, workers=workers, run_dir=run_dir, watcher=watcher), as_json)
