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
    terms = {"parameters": held.parameters, "gradients": held.gradients, "optimiser state": held.optimizer}
    terms |= held.exchange | {"gathered weights": held.gathered, "activations": held.activations, "total": held.total}
    away = {"in main memory": held.offloaded, "on all servers": held.served}
    for name, size in (terms | {name: size for name, size in away.items() if size}).items():
        table.add_row(name, f"{size / unit:,.2f}")
    console = Console(highlight=False)
    console.print(f"{held.layout}, activations in {held.precision}")
    console.print(table)
