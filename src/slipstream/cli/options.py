"""Options that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
FleetName = Literal["local", "ray", "slurm", "kubernetes", "skypilot"]
Fleets = Annotated[FleetName, typer.Option("--on", help="The fleet.", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Rent without asking, where machines are rented.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, or its name under runs/.")]


def layout_settings(text: str | None) -> list[str]:
    """`shard=2,tensor=2` as settings of the job; `auto` as it is."""
    if text and text.strip() == "auto":
        return ["layout=auto"]
    if text is None:
        return []
    parts = [part.strip() for part in text.split(",")]
    keys = [part.partition("=")[0].strip() for part in parts]
    for part, key in zip(parts, keys, strict=True):
        if not key or "=" not in part:
            raise typer.BadParameter(f"--layout {text}: {part!r} is not key=value; for example shard=2,tensor=2")
        if keys.count(key) > 1:
            raise typer.BadParameter(f"--layout {text}: {key} is given more than once")
    return [f"layout.{part}" for part in parts]
