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

    unit, name_of_unit = (1e9, "GB") if held.total > 1e9 else (1e6, "MB")
    table = Table("rank " + str(held.rank), name_of_unit, box=None, padding=(0, 2))
    table.columns[1].justify = "right"
    for name in ("parameters", "gradients", "optimizer", "gathered", "activations", "total"):
        words = {"optimizer": "optimiser state", "gathered": "gathered weights"}.get(name, name)
        table.add_row(words, f"{getattr(held, name) / unit:,.2f}")
    if held.offloaded:
        table.add_row("in main memory", f"{held.offloaded / unit:,.2f}")
    console = Console(highlight=False)
    console.print(f"{held.layout}, activations in {held.precision}")
    console.print(table)
