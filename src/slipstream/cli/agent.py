"""`slipstream agent`: what a fleet starts on every machine. Not for people."""

import os
import signal
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.errors import AGAIN, INTERRUPTED, stopped_code

_SELDOM = 2.0


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, here or in object storage.")],
    tied: Annotated[bool, typer.Option("--tied", help="End when standard input does.")] = False,
) -> None:
    """This machine's part of a run."""
    from slipstream.data.storage import is_remote
    from slipstream.fleet.agent import exit_code, run_agent
    from slipstream.fleet.keeper import end_with_input
    from slipstream.fleet.launch import Silence
    from slipstream.fleet.mirror import STORE, Mirror, begin_here
    from slipstream.fleet.place import Apart, machine_number
    from slipstream.runs import RunFolder
    from slipstream.runs.cache import cache_folder

    mirror: Mirror | None = None
    if is_remote(run):
        name = f"{run.rstrip('/').rpartition('/')[2]}-{machine_number() or 0}"
        folder, mirror = begin_here(run, cache_folder() / "runs" / name)
        os.environ[STORE] = run
    else:
        folder = RunFolder.open(Path(run))

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
        with mirror.kept_up() if mirror else nullcontext():
            result = run_agent(folder, Spoken())
    except KeyboardInterrupt:
        raise typer.Exit(AGAIN if warned.is_set() else INTERRUPTED) from None
    except Apart as error:
        print(error, file=sys.stderr)
        raise typer.Exit(exit_code(error)) from error
    if result and result.status == "stopped":
        code = stopped_code(result)
        raise typer.Exit(AGAIN if code == INTERRUPTED and warned.is_set() else code)
