"""`slipstream resume`: go on with a run that was stopped or killed."""

from typing import Annotated

import typer

from slipstream.cli.options import AsJson, RunArgument


def command(
    run: RunArgument,
    workers: Annotated[int | None, typer.Option(min=1, help="Another number of workers than before.")] = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its newest whole checkpoint."""
    from slipstream import api
    from slipstream.cli.watching import watch

    watch(lambda watcher: api.resume(run, workers=workers, watcher=watcher), as_json)
