"""`slipstream stop`: save a run that was submitted, and stop it."""

from slipstream.cli.options import RunArgument


def command(run: RunArgument) -> None:
    """Stop a run on a fleet, with a checkpoint."""
    from slipstream.api import find_run
    from slipstream.submissions import stop

    folder = find_run(run)
    stop(folder)
    if folder.program.exists():
        print(f"{folder.name} is asked to end")
    else:
        print(f"{folder.name} is asked to save and stop; `slipstream attach {folder.path}` waits for it")
