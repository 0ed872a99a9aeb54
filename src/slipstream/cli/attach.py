"""`slipstream attach`: the live progress of a run, wherever it is."""

import sys
import time

import typer

from slipstream.cli.errors import INTERRUPTED, STOPPED
from slipstream.cli.options import RunArgument

_TICK = 0.1


def command(run: RunArgument) -> None:
    """Watch a run until it ends. Ctrl-C stops watching, not the run."""
    from slipstream.api import find_run
    from slipstream.cli.screen import Screen, show_result
    from slipstream.runs.result import read_result
    from slipstream.submitting import is_over, last_words

    folder = find_run(run)
    screen = Screen()
    try:
        _watch(screen, folder)
    except KeyboardInterrupt:
        print(f"{folder.name} goes on; `slipstream stop {folder.path}` stops it", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    finally:
        screen.close()
    assert is_over(folder)
    result = read_result(folder)
    if result:
        show_result(screen.console, folder, result)
        if result.status == "stopped":
            raise typer.Exit(INTERRUPTED if result.reason == "interrupted" else STOPPED)
        return
    words, code = last_words(folder)
    print(words, file=sys.stderr)
    raise typer.Exit(code)


def _watch(screen: "Screen", folder: "RunFolder") -> None:  # type: ignore[name-defined] # noqa: F821
    from slipstream.api import read_plan
    from slipstream.job import load_job
    from slipstream.submitting import is_over, status_of

    said = None
    begun = False
    while not is_over(folder):
        status = status_of(folder)
        if status.state == "queued" and status.detail != said:
            said = status.detail
            screen.say(f"waiting: {said}")
        plan = read_plan(folder)
        if not begun and plan and folder.events.exists():
            screen.started(folder, load_job(folder.job), plan, since_start=True)
            begun = True
        if begun:
            screen.tick()
        time.sleep(_TICK)
