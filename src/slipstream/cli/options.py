"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, or its name under runs/.")]


def layout_settings(text: str | None) -> list[str]:
    """`shard=2,tensor=2` as settings of the job; `auto` as it is."""
    if text and text.strip() == "auto":
        return ["layout=auto"]
    return [f"layout.{part.strip()}" for part in text.split(",") if part.strip()] if text else []
