"""`slipstream resume`: go on with a run that was stopped or killed."""

from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import AsJson, FleetName, RunArgument, Yes, layout_settings


def command(
    run: RunArgument,
    workers: Annotated[int | None, typer.Option(min=1, help="Another number of workers than before.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="Another layout than before: shard=2,tensor=2, or auto; the run remembers it.")
    ] = None,
    on: Annotated[
        FleetName | None, typer.Option(help="Go on on the fleet that it was submitted to, as it was planned.")
    ] = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its newest whole checkpoint."""
    from slipstream import api
    from slipstream.cli.watching import watch
    from slipstream.submitting import refuse_if_away

    if on:
        if workers or layout or as_json:
            raise typer.BadParameter("--workers, --layout and --json have no effect with --on: it goes on as planned")
        _send_again(run, on, yes)
        return
    if yes:
        raise typer.BadParameter("--yes has no effect without --on")
    refuse_if_away(api.find_run(run))

    settings = layout_settings(layout)
    watch(lambda watcher: api.resume(run, workers=workers, settings=settings, watcher=watcher), as_json)


def _send_again(run: Path, on: FleetName, yes: bool) -> None:
    from slipstream.api import find_run
    from slipstream.cli.submit import agree
    from slipstream.submissions import refresh
    from slipstream.submitting import prepare_again, send_again

    folder = refresh(find_run(run))
    fleet, order = prepare_again(folder, on)
    if order.price:
        agree(order.price, yes)
    send_again(folder, on, fleet, order)
    print(f"{folder.name} goes on on {on}; `slipstream attach {folder.path}` watches it")
