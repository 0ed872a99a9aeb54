"""What can be rented, where, and for how much.

The package has a table of its own (`tables/offers.csv`, made by `scripts/make_offers.py`). `refresh` reads a newer one
and keeps it in the cache folder; from then on it stands for the package's rows of the clouds that it has.
"""

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path

from slipstream.job.base import nearest, shown
from slipstream.plan.accelerators import find_accelerator, variants
from slipstream.plan.offer_table import Offer, read_table, read_whole_table, table_text
from slipstream.runs.cache import cache_folder
from slipstream.runs.folder import write_text

__all__ = [
    "STALE_DAYS", "Offer", "Refreshed", "cheapest_offers", "filter_offers", "load_offers", "read_table", "refresh",
    "refreshed_table", "sort_offers", "stale",
]  # fmt: skip

STALE_DAYS = 60
"""Prices older than this are shown with a warning."""
ORDERS = ("price", "each", "gpu", "memory")
"""By what a list of offers can be sorted."""
_TABLE = Path(__file__).parent / "tables" / "offers.csv"


@dataclass(frozen=True)
class Refreshed:
    """What a refresh has done."""

    path: Path
    """The table that is used from now on."""
    offers: int
    """Rows that were taken."""
    clouds: tuple[str, ...]
    left_out: dict[str, int]
    """Why rows were left out, and how many."""
    replaced: int
    """Offers of the same clouds that were known before, and are not used any more."""
    older: bool
    """Whether those had newer prices."""


def load_offers() -> tuple[Offer, ...]:
    """All offers: the user's table if there is one, and the package's for what that lacks. Raises ValueError."""
    own = refreshed_table()
    package = _read(_TABLE, _TABLE.stat().st_mtime_ns)
    if not own.exists():
        return package
    try:
        fresh = _read(own, own.stat().st_mtime_ns)
    except ValueError as error:
        raise ValueError(f"{error}; remove {own} to use the package's table, or refresh again") from error
    return _merge(fresh, package)


def refreshed_table() -> Path:
    """Where `refresh` keeps what it has read."""
    return cache_folder() / "offers.csv"


def refresh(source: str | Path) -> Refreshed:
    """Read a newer table from a file or an address, check it, and use it from now on. Raises ValueError."""
    reading = read_whole_table(source)
    today, target = datetime.date.today(), refreshed_table()
    if late := [offer for offer in reading.offers if offer.date > today]:
        raise ValueError(f"{source}: {late[0].cloud} {late[0].machine} has a price of {late[0].date}, a day to come")
    try:
        earlier = read_table(target) if target.exists() else []
    except ValueError:  # damaged: this is how to mend it
        earlier = []
    spoken_for = {_group(offer) for offer in reading.offers}
    package = _read(_TABLE, _TABLE.stat().st_mtime_ns)
    gone = [offer for offer in _merge(earlier, package) if _group(offer) in spoken_for]
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, table_text(_merge(reading.offers, earlier)))
    clouds = tuple(sorted({offer.cloud for offer in reading.offers}))
    newest_before = max((offer.date for offer in gone), default=None)
    older = bool(newest_before and max(offer.date for offer in reading.offers) < newest_before)
    return Refreshed(target, len(reading.offers), clouds, dict(reading.left_out), len(gone), older)


def filter_offers(
    offers: Iterable[Offer],
    gpu: str | None = None,
    clouds: Sequence[str] | None = None,
    regions: Sequence[str] | None = None,
    spot: bool = False,
) -> tuple[Offer, ...]:
    """Those that fit. Raises ValueError for a name that is not there, with the valid ones.

    `gpu` is one name or several with commas; `H100` stands for its variants too. A region may have a `*` in it.
    """
    found = tuple(offers)
    if clouds:
        found = _of_clouds(found, clouds)
    if gpu:
        names = {name for word in gpu.split(",") if word.strip() for name in _names(word.strip())}
        found = tuple(offer for offer in found if offer.accelerator.name in names)
    if regions:
        found = _of_regions(found, regions)
    return tuple(offer for offer in found if offer.spot is not None) if spot else found


def cheapest_offers(offers: Iterable[Offer], spot: bool = False) -> list[Offer]:
    """Of each machine of each cloud the region where it costs least."""
    best: dict[tuple[str, str, str, int], Offer] = {}
    for offer in offers:
        key = (offer.cloud, offer.machine, offer.accelerator.name, offer.count)
        if key not in best or _cost(offer, spot) < _cost(best[key], spot):
            best[key] = offer
    return list(best.values())


def sort_offers(offers: Iterable[Offer], by: str = "price", spot: bool = False) -> list[Offer]:
    """By `price` of the machine, price of `each` accelerator, name (`gpu`), or all its GPUs' `memory`, most first."""
    if by not in ORDERS:
        raise ValueError(f"offers cannot be sorted by {shown(by)}{nearest(by, ORDERS)}; valid: {', '.join(ORDERS)}")

    def key(offer: Offer) -> tuple[float | str, ...]:
        each = _cost(offer, spot) / offer.count
        first: dict[str, tuple[float | str, ...]] = {
            "price": (_cost(offer, spot), each),
            "each": (each, _cost(offer, spot)),
            "gpu": (offer.accelerator.name, each),
            "memory": (-offer.count * offer.accelerator.memory, each),
        }
        return (*first[by], offer.cloud, offer.machine, offer.region)

    return sorted(offers, key=key)


def stale(offers: Iterable[Offer], today: datetime.date) -> str | None:
    """A sentence if prices are older than `STALE_DAYS`; None if all are newer."""
    oldest: dict[str, int] = {}
    for offer in offers:
        oldest[offer.cloud] = max(oldest.get(offer.cloud, 0), (today - offer.date).days)
    old = sorted((cloud for cloud in oldest if oldest[cloud] > STALE_DAYS), key=lambda cloud: -oldest[cloud])
    if not old:
        return None
    named = old if len(old) <= 4 else [*old[:3], f"{len(old) - 3} more clouds"]
    names = " and ".join(filter(None, [", ".join(named[:-1]), named[-1]]))
    least, most = oldest[old[-1]], oldest[old[0]]
    ages = f"{most}" if least == most else f"{least} to {most}"
    return f"prices of {names} are {ages} days old; `slipstream offers refresh` reads newer ones"


@lru_cache(maxsize=4)
def _read(path: Path, changed: int) -> tuple[Offer, ...]:  # noqa: ARG001 - a table that has changed is read again
    return tuple(read_table(path))


def _merge(fresh: Iterable[Offer], older: Iterable[Offer]) -> tuple[Offer, ...]:
    """The fresh ones, and of the older those of other clouds. Google's TPUs and GPUs come in tables of their own."""
    fresh = tuple(fresh)
    replaced = {_group(offer) for offer in fresh}
    return fresh + tuple(offer for offer in older if _group(offer) not in replaced)


def _group(offer: Offer) -> tuple[str, str]:
    """What a table speaks for."""
    return offer.cloud, offer.accelerator.kind


def _cost(offer: Offer, spot: bool) -> float:
    return offer.spot if spot and offer.spot is not None else offer.price


def _names(word: str) -> list[str]:
    """The accelerators that a word stands for."""
    return [each.name for each in variants(word)] or [find_accelerator(word).name]


def _of_clouds(offers: tuple[Offer, ...], clouds: Sequence[str]) -> tuple[Offer, ...]:
    known = sorted({offer.cloud for offer in offers})
    wanted = [cloud.strip().lower() for cloud in clouds]
    for cloud in wanted:
        if cloud not in known:
            raise ValueError(f"unknown cloud {cloud!r}{nearest(cloud, known)}; clouds with offers: {', '.join(known)}")
    return tuple(offer for offer in offers if offer.cloud in wanted)


def _of_regions(offers: tuple[Offer, ...], regions: Sequence[str]) -> tuple[Offer, ...]:
    known = sorted({offer.region for offer in offers})
    fitting: set[str] = set()
    for wanted in (region.strip() for region in regions):
        found = {region for region in known if fnmatchcase(region.lower(), wanted.lower())}
        if not found:
            there = ", ".join(known) if len(known) <= 40 else "`slipstream offers --all-regions --limit 0` lists them"
            raise ValueError(f"no such offer in region {wanted!r}{nearest(wanted, known)}; regions: {there or 'none'}")
        fitting |= found
    return tuple(offer for offer in offers if offer.region in fitting)
