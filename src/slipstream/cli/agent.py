"""`slipstream agent`: what a fleet starts on every machine. Not for people."""

import os
import signal
import sys
import threading
import time
from typing import Annotated

import typer

from slipstream.cli.errors import AGAIN, INTERRUPTED, STOPPED
from slipstream.cli.options import RunArgument

_SELDOM = 2.0


def command(
    run: RunArgument, tied: Annotated[bool, typer.Option("--tied", help="End when standard input does.")] = False
) -> None:
    """This machine's part of a run."""
    from slipstream.fleet.agent import exit_code, run_agent
    from slipstream.fleet.keeper import end_with_input
    from slipstream.fleet.launch import Silence
    from slipstream.fleet.place import Apart
    from slipstream.runs import RunFolder

    folder = RunFolder.open(run)

    class Spoken(Silence):
        looked = 0.0

        def say(self, text: str) -> None:
            print(text, flush=True)

        def tick(self) -> None:
            if time.monotonic() - self.looked > _SELDOM:  # the folder may be far away
                self.looked = time.monotonic()
                if folder.heard_to_stop():
                    os.kill(os.getpid(), signal.SIGTERM)

    warned = threading.Event()

    def save_and_end(_number: int, _frame: object) -> None:
        warned.set()
        os.kill(os.getpid(), signal.SIGTERM)

    if tied:
        end_with_input()
    signal.signal(signal.SIGUSR1, save_and_end)  # schedulers warn by it that a time limit is near
    try:
        result = run_agent(folder, Spoken())
    except KeyboardInterrupt:
        raise typer.Exit(AGAIN if warned.is_set() else INTERRUPTED) from None
    except Apart as error:
        print(error, file=sys.stderr)
        raise typer.Exit(exit_code(error)) from error
    if result and result.status == "stopped":
        asked = result.reason == "interrupted"
        raise typer.Exit(AGAIN if asked and warned.is_set() else INTERRUPTED if asked else STOPPED)
