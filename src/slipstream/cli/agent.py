"""`slipstream agent`: what a fleet starts on every machine. Not for people."""

import sys
from typing import Annotated

import typer

from slipstream.cli.errors import AGAIN, INTERRUPTED, stopped_code


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's folder, here or in object storage.")],
    tied: Annotated[bool, typer.Option("--tied", help="End when standard input does.")] = False,
) -> None:
    """This machine's part of a run."""
    from slipstream.fleet.agent import Attentive, exit_code, hear_warning, run_agent
    from slipstream.fleet.keeper import end_with_input
    from slipstream.fleet.mirror import at_hand
    from slipstream.fleet.place import Apart

    warned = hear_warning()
    if tied:
        end_with_input()
    with at_hand(run) as folder:
        try:
            result = run_agent(folder, Attentive(folder, warned))
        except KeyboardInterrupt:
            code = INTERRUPTED
        except Apart as error:
            print(error, file=sys.stderr)
            code = exit_code(error)
        else:
            code = stopped_code(result) if result and result.status == "stopped" else 0
    if code:
        raise typer.Exit(AGAIN if code == INTERRUPTED and warned.is_set() else code)
