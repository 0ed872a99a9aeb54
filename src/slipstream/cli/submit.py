"""`slipstream submit`: run a job on a fleet."""

import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.errors import REFUSED
from slipstream.cli.options import Fleets, Yes, layout_settings


def command(
    job: Annotated[Path, typer.Argument(metavar="JOB | SCRIPT.py", help="The job file, or somebody's program.")],
    on: Fleets,
    args: Annotated[list[str] | None, typer.Argument(metavar="[-- ARGS…]", help="For a program.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: train.batch=64.")] = None,
    layout: Annotated[str | None, typer.Option(help="How to split: shard=2,tensor=2.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan that `slipstream plan --save` has written.")] = None,
    machines: Annotated[int | None, typer.Option(min=1, help="Machines. Default: machines.count, else one.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="On all machines. Default: as there is room for.")] = None,
    mpi: Annotated[bool, typer.Option("--mpi", help="Start a program by mpirun.")] = False,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of this run. Default: runs/NAME-1, -2, …")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only print what would be sent to the engine.")] = False,
    yes: Yes = False,
) -> None:
    """Run a job on a fleet: it goes on when the terminal closes."""
    from slipstream import submitting
    from slipstream.submissions import record_of

    where = {"machines": machines, "workers": workers}
    if job.suffix == ".py":
        if plan or layout:
            raise typer.BadParameter("--plan and --layout are for jobs; a program splits its work itself")
        ready = submitting.prepare_program(
            job, args or [], on, settings=settings or [], mpi=mpi, run_dir=run_dir, **where
        )
    else:
        if plan and layout:
            raise typer.BadParameter("--plan has a layout already; give one of --plan and --layout")
        if args or mpi:
            raise typer.BadParameter("--mpi and arguments are for programs (SCRIPT.py); a job file has no use for them")
        wanted = [*(settings or []), *layout_settings(layout)]
        ready = submitting.prepare(job, on, settings=wanted, plan=plan, run_dir=run_dir, **where)
    if dry_run:
        print(ready.fleet.render(ready.order), end="")
        return
    if ready.order.price:
        agree(ready.order.price, yes)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was begun is taken back, as by Ctrl-C
    run = submitting.send(ready, run_dir)
    print(f"{run.name} is on {on} as {record_of(run).id}")
    next_ones = {"attach": "watch it", "logs": "what it says", "stop": "save and stop"}
    if run.program.exists():
        next_ones = {"logs -f": "what it says", "stop": "end it"}
    for words, meaning in next_ones.items():
        print(f"  slipstream {words:<7} {run.path}   # {meaning}")


def agree(price: str, yes: bool) -> None:
    """Nothing is rented before somebody has seen what it costs and agreed."""
    print(price)
    if yes:
        return
    if not sys.stdin.isatty():
        print("nobody is at a terminal to agree to that: add --yes", file=sys.stderr)
        raise typer.Exit(REFUSED)
    if not typer.confirm("rent it?"):
        print("nothing was rented", file=sys.stderr)
        raise typer.Exit(REFUSED)
