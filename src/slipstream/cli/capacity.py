"""`slipstream capacity`: what a fleet can give now."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slipstream.cli.options import AsJson, Fleets


def command(
    on: Fleets,
    job: Annotated[Path | None, typer.Option(help="A job file, for what it says of the fleet.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a fleet can give now."""
    from slipstream.submitting import capacity

    rooms = capacity(on, job)
    if as_json:
        print(json.dumps([asdict(room) for room in rooms], indent=2))
        return
    if not rooms:
        print(f"{on} has no free machines now")
    for room in rooms:
        print(f"{room.machines:>4} × {room.machine}" + (f"   in {room.where}" if room.where else ""))
