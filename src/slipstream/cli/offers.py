"""`slipstream offers`: what can be rented and for how much; `slipstream offers refresh` reads newer prices."""

import datetime
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.cli.errors import REFUSED
from slipstream.cli.options import AsJson

if TYPE_CHECKING:
    from slipstream.plan.offers import Offer

_ROWS = 30
app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def command(
    context: typer.Context,
    gpu: Annotated[
        str | None, typer.Option(help="Accelerators: H100, or A100-80GB,H200. H100 means all of its kinds.")
    ] = None,
    cloud: Annotated[str | None, typer.Option(help="Clouds: aws,gcp.")] = None,
    region: Annotated[str | None, typer.Option(help="Regions: us-east-1,eu-*.")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="Only what has a spot price, and by that.")] = False,
    sort: Annotated[str, typer.Option(help="By price, each (accelerator's price), gpu or memory.")] = "price",
    all_regions: Annotated[bool, typer.Option("--all-regions", help="Every region, not only the cheapest.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=0, help=f"Rows; 0 for all. Default: {_ROWS}, with --json all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what can be rented, the cheapest region of each machine."""
    if context.invoked_subcommand:
        return
    from slipstream.plan.offers import cheapest_offers, filter_offers, load_offers, sort_offers, stale

    with _refusing():
        found = filter_offers(load_offers(), gpu, _words(cloud), _words(region), spot)
        chosen = sort_offers(found if all_regions else cheapest_offers(found, spot), sort, spot)
    rows = (0 if as_json else _ROWS) if limit is None else limit
    shown = chosen[:rows] if rows else chosen
    warning = stale(shown, datetime.date.today())
    if as_json:
        print(json.dumps({"offers": [describe(offer) for offer in shown], "stale": warning}, indent=2))
        return
    if not shown:
        print("nothing is offered that fits; ask for less, or read other tables: `slipstream offers refresh`")
        return
    _show(shown, spot)
    if len(chosen) > len(shown):
        print(f"and {len(chosen) - len(shown):,} more; --limit 0 shows all")
    if any(offer.network_assumed for offer in shown):
        print("Gbit/s with a ? are a cautious guess: the cloud does not document them")
    if warning:
        print(warning)


@app.command("refresh")
def refresh_command(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A table of offers: a file, or its http(s) address.")],
    as_json: AsJson = False,
) -> None:
    """Read newer prices from a file or an address, and use them from now on."""
    from slipstream.plan.offers import refresh

    with _refusing():
        done = refresh(source)
    if as_json:
        print(
            json.dumps(
                {
                    "path": str(done.path),
                    "offers": done.offers,
                    "replaced": done.replaced,
                    "clouds": done.clouds,
                    "left_out": done.left_out,
                }
            )
        )
        return
    instead = f" instead of {done.replaced:,}" if done.replaced else ""
    print(
        f"{done.offers:,} offers of {', '.join(done.clouds)} are used from now on{instead}; they are kept in "
        f"{done.path}, and gone when you remove that"
    )
    if done.older:
        print("those before had newer prices")
    for reason, number in done.left_out.items():
        print(f"{number:,} rows left out: {reason}")


def describe(offer: "Offer") -> dict[str, Any]:
    """An offer for programs: bytes, bytes a second, dollars an hour."""
    return {
        "cloud": offer.cloud,
        "machine": offer.machine,
        "accelerator": offer.accelerator.name,
        "count": offer.count,
        "accelerator_memory": offer.accelerator.memory,
        "cores": offer.cores,
        "memory": offer.memory,
        "link": offer.link,
        "link_kind": offer.link_kind,
        "network": offer.network,
        "network_kind": offer.network_kind,
        "network_assumed": offer.network_assumed,
        "region": offer.region,
        "price": offer.price,
        "spot": offer.spot,
        "price_per_accelerator": offer.price_per_accelerator,
        "spot_per_accelerator": offer.spot_per_accelerator,
        "date": offer.date.isoformat(),
    }


def _show(offers: Sequence["Offer"], spot: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    console = Console(highlight=False, markup=False)
    shown = [column for column, least in _COLUMNS.items() if console.width >= least]
    for column in shown:
        table.add_column(column, justify="right" if column == "memory" or "/" in column else "left", no_wrap=True)
    for offer in offers:
        each = offer.spot_per_accelerator if spot else offer.price_per_accelerator
        memory = f"{offer.count * offer.accelerator.memory / 2**30:,.0f} GiB"
        network = f"{offer.network * 8 / 1e9:,.1f}".removesuffix(".0") + ("?" if offer.network_assumed else "")
        cells = (
            offer.cloud, offer.machine, f"{offer.count} × {offer.accelerator.name}", memory, network,
            offer.network_kind, offer.region, _dollars(offer.price), _dollars(offer.spot), _dollars(each),
        )  # fmt: skip
        table.add_row(*(cell for column, cell in zip(_COLUMNS, cells, strict=True) if column in shown))
    console.print(table)


_COLUMNS = {
    "cloud": 0, "machine": 80, "accelerators": 0, "memory": 120, "Gbit/s": 110, "network": 120, "region": 100,
    "price/h": 0, "spot/h": 0, "each/h": 86,
}  # fmt: skip
"""How wide a screen must be for a column to be shown."""


def _dollars(amount: float | None) -> str:
    return "" if amount is None else f"${amount:,.2f}"


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()] if text else []


@contextmanager
def _refusing() -> Iterator[None]:
    """What is wrong with names and tables is the user's to mend: a line, and the exit code for it."""
    try:
        yield
    except ValueError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(REFUSED) from error
