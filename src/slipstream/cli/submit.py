"""`slipstream submit`: run a job on a fleet."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import Fleets, layout_settings


def command(
    job: Annotated[Path, typer.Argument(help="The job file.")],
    on: Fleets,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: train.batch=64.")] = None,
    layout: Annotated[str | None, typer.Option(help="How to split: shard=2,tensor=2.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan that `slipstream plan --save` has written.")] = None,
    machines: Annotated[int | None, typer.Option(min=1, help="Machines. Default: machines.count, else one.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Workers on all of them. Default: all there is room for.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of this run. Default: runs/NAME-1, -2, …")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be sent to the engine.")] = False,
) -> None:
    """Run a job on a fleet: it goes on when the terminal closes."""
    from slipstream import submitting

    if plan and layout:
        raise typer.BadParameter("--plan has a layout already; give one of --plan and --layout")
    if dry_run and run_dir:
        raise typer.BadParameter("--run-dir has no effect in a dry run, which writes nothing")
    wanted = [*(settings or []), *layout_settings(layout)]
    ready = submitting.prepare(job, on, settings=wanted, plan=plan, machines=machines, workers=workers)
    if dry_run:
        print(ready.fleet.render(ready.order), end="")
        return
    run = submitting.send(ready, run_dir)
    record = submitting.read_submission(run)
    assert record, "send leaves one"
    print(f"{run.name} is on {on} as {record.id}")
    for words, meaning in (("attach", "watch it"), ("logs", "what it says"), ("stop", "save and stop")):
        print(f"  slipstream {words:<6} {run.path}   # {meaning}")
