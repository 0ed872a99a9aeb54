"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, or its name under runs/.")]
