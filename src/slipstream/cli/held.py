"""What a dry run found, as a table."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.train.dry_run import Held


def show_held(held: "Held", as_json: bool) -> None:
    """Print what one rank would hold."""
    if as_json:
        print(json.dumps({**asdict(held), "total": held.total}, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("rank " + str(held.rank), "GB", box=None, padding=(0, 2))
    table.columns[1].justify = "right"
    for name in ("parameters", "gradients", "optimizer", "activations", "total"):
        table.add_row(name.replace("optimizer", "optimiser state"), f"{getattr(held, name) / 1e9:,.2f}")
    if held.offloaded:
        table.add_row("in main memory", f"{held.offloaded / 1e9:,.2f}")
    console = Console(highlight=False)
    console.print(held.layout)
    console.print(table)
