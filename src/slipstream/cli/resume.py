"""`slipstream resume`: go on with a run that was stopped or killed."""

from typing import Annotated

import typer

from slipstream.cli.options import AsJson, RunArgument, layout_settings


def command(
    run: RunArgument,
    workers: Annotated[int | None, typer.Option(min=1, help="Another number of workers than before.")] = None,
    layout: Annotated[
        str | None, typer.Option(help="Another layout than before: shard=2,tensor=2, or auto; the run remembers it.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Go on with a run from its newest whole checkpoint."""
    from slipstream import api
    from slipstream.cli.watching import watch

    settings = layout_settings(layout)
    watch(lambda watcher: api.resume(run, workers=workers, settings=settings, watcher=watcher), as_json)
