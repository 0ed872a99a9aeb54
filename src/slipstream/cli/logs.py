"""`slipstream logs`: what a run has said, here or on any fleet."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from slipstream.cli.options import RunArgument

if TYPE_CHECKING:
    from slipstream.runs import RunFolder

_TICK = 0.2


def command(
    run: RunArgument,
    rank: Annotated[
        int | None, typer.Option(min=0, help="This rank's log alone. Default: the launcher's and all.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """Print what a run and its workers have said."""
    from slipstream.api import find_run
    from slipstream.runs import RunError
    from slipstream.submissions import is_over, refresh

    folder = refresh(find_run(run))
    shown: dict[Path, int] = {}
    while True:
        over = not follow or is_over(folder)
        files = sorted(folder.logs.glob("*.log")) if rank is None else [folder.logs / f"rank-{rank}.log"]
        if rank is not None and not files[0].exists() and over:
            raise RunError(f"{folder.path} has no log of rank {rank}")
        for file in files:
            _print_new(file, shown, several=len(files) > 1)
        if over:
            if rank is None:
                _print_engine_log(folder)
            return
        time.sleep(_TICK)


def _print_engine_log(folder: "RunFolder") -> None:
    """What only the fleet has; a run can be read when its fleet is gone."""
    from slipstream.fleet.base import FleetError
    from slipstream.submissions import engine_log

    try:
        fleet, text = engine_log(folder)
    except FleetError as error:
        print(f"the fleet's own log cannot be had: {error}", file=sys.stderr)
        return
    for line in text.splitlines():
        print(f"{fleet:<10} {line}")


def _print_new(file: Path, shown: dict[Path, int], several: bool) -> None:
    """Whole lines that were not printed yet; where there are several logs, each with the name of its own."""
    if not file.exists():
        return
    with file.open("rb") as log:
        log.seek(shown.get(file, 0))
        text = log.read()
    whole = text[: text.rfind(b"\n") + 1]
    shown[file] = shown.get(file, 0) + len(whole)
    for line in whole.decode(errors="replace").splitlines():
        print(f"{file.stem:<10} {line}" if several else line, flush=True)
