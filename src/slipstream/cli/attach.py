"""`slipstream attach`: the live progress of a run, wherever it is."""

import math
import sys
import time
from typing import TYPE_CHECKING

import typer

from slipstream.cli.errors import INTERRUPTED, stopped_code
from slipstream.cli.options import RunArgument

if TYPE_CHECKING:
    from slipstream.cli.screen import Screen
    from slipstream.runs import RunFolder

_TICK, _ASK = 0.1, 0.5
"""Seconds between two looks into the run's folder, and between two questions to its fleet."""
_PATIENCE = 60.0
"""Seconds for which an engine that does not answer any more is asked again: the run goes on meanwhile."""


def command(run: RunArgument) -> None:
    """Watch a run until it ends. Ctrl-C stops watching, not the run."""
    from slipstream.api import find_run
    from slipstream.cli.screen import Screen, show_result
    from slipstream.runs import RunError
    from slipstream.runs.result import read_result
    from slipstream.submissions import last_words, refresh

    folder = refresh(find_run(run))
    if folder.program.exists():
        raise RunError(
            f"{folder.path} is a program's, which shows no progress; `slipstream logs -f {folder.path}` does"
        )
    screen = Screen()
    try:
        _watch(screen, folder)
    except KeyboardInterrupt:
        print(f"{folder.name} goes on; `slipstream stop {folder.path}` stops it", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        screen.close()
    result = read_result(folder)
    if result:
        show_result(screen.console, folder, result)
        if result.status == "stopped":
            raise typer.Exit(stopped_code(result))
        return
    words, code = last_words(folder)
    print(words, file=sys.stderr)
    raise typer.Exit(code)


def _watch(screen: "Screen", folder: "RunFolder") -> None:
    from slipstream.api import read_plan
    from slipstream.fleet.base import FleetError
    from slipstream.job import load_job
    from slipstream.submissions import is_over, standing_of

    said, begun, asked, answered = "", False, 0.0, -math.inf
    while True:
        ask = time.monotonic() - asked > _ASK
        if ask:
            try:
                if is_over(folder):
                    return
                answered = time.monotonic()
            except FleetError:
                if time.monotonic() - answered > _PATIENCE:
                    raise
            asked = time.monotonic()
        plan = read_plan(folder)
        if begun:
            screen.tick()
        elif plan and folder.events.exists():
            screen.started(folder, load_job(folder.job), plan, since_start=True)
            begun = True
        elif ask and said != (standing := standing_of(folder, "")):
            said = standing
            screen.say(f"{folder.name}: {said}")
        time.sleep(_TICK)
