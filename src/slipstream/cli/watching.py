"""Run something that trains, and show it."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict

import typer

from slipstream.api import Silence, Watcher
from slipstream.cli.errors import INTERRUPTED, stopped_code
from slipstream.cli.screen import Screen, show_next, show_result
from slipstream.runs import RunFolder
from slipstream.runs.checkpoints import whole_checkpoints
from slipstream.runs.result import Result


def _ended_at_once(run: RunFolder | None) -> str:
    if run is None:
        return "ended at once"
    does = "goes on" if whole_checkpoints(run.checkpoints) else "begins anew, as there is no checkpoint yet"
    return f"ended at once; `slipstream resume {run.path}` {does}"


def watch(start: Callable[[Watcher], Result], as_json: bool) -> None:
    """Show a run from its plan to its result; with `as_json` only the result, as JSON."""
    screen = Silence() if as_json else Screen()
    try:
        result = start(screen)
    except KeyboardInterrupt:
        print(_ended_at_once(screen.run), file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        screen.close()
    if isinstance(screen, Screen):
        run = RunFolder(result.run)
        show_result(screen.console, run, result)
        show_next(screen.console, run, result)
    else:
        print(json.dumps(asdict(result), indent=2))
    if result.status == "stopped":
        raise typer.Exit(stopped_code(result))
