"""Tables of offers: reading them strictly, and writing them.

A table has one row for each machine of each cloud in each region, with the columns `COLUMNS`. Rows of what we do not
rent (an accelerator we know nothing of, a part of one, a price without a machine) are left out and counted; a row that
is wrong is an error with file, line and column. How machines are wired is added from `nodes.csv`.
"""

import csv
import datetime
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from pathlib import Path

from slipstream.job.base import shown
from slipstream.job.units import plain
from slipstream.plan.accelerators import Accelerator, accelerators, variants
from slipstream.plan.nodes import find_node

COLUMNS = (
    "Cloud", "InstanceType", "AcceleratorName", "AcceleratorCount", "GpuMemGiB", "vCPUs", "MemoryGiB", "Region",
    "Price", "SpotPrice", "CatalogDate",
)  # fmt: skip
_OPTIONAL = {"GpuMemGiB", "vCPUs", "MemoryGiB", "SpotPrice"}
_ALSO_CALLED = {"Chips(derived)": "AcceleratorCount"}
_LARGEST_TABLE = 100_000_000
"""Bytes: more is not a table of offers."""
_SECONDS = 30
"""How long an address may be silent."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One kind of machine that can be rented, in one region. A slice of a TPU pod is one machine."""

    cloud: str
    machine: str
    """The cloud's name for it."""
    accelerator: Accelerator
    count: int
    """Accelerators in it; chips of a TPU."""
    cores: int
    """Virtual CPUs; 0 where the table does not say."""
    memory: int
    """Bytes of main memory; 0 where the table does not say."""
    region: str
    price: float
    """Dollars an hour, on demand."""
    spot: float | None
    """Dollars an hour when it may be taken away; None where it is not offered."""
    link: float
    """Bytes a second of a device to the others in the machine, one direction."""
    link_kind: str
    network: float
    """Bytes a second of the whole machine to other machines, one direction."""
    network_kind: str
    network_assumed: bool
    """Whether the network is our cautious guess."""
    date: datetime.date
    """Of the price."""

    @property
    def price_per_accelerator(self) -> float:
        """Dollars an hour, on demand."""
        return self.price / self.count

    @property
    def spot_per_accelerator(self) -> float | None:
        """Dollars an hour, as long as it lasts."""
        return None if self.spot is None else self.spot / self.count


@dataclass
class Reading:
    """What a table gave."""

    offers: list[Offer] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    """Why, and how many rows."""


def read_table(source: str | Path) -> list[Offer]:
    """The offers of a file or an http(s) address. Raises ValueError: what is wrong, in which line and column."""
    return read_whole_table(source).offers


def read_whole_table(source: str | Path) -> Reading:
    """The same, with what was left out."""
    reading = parse_table(_text(source), str(source))
    if not reading.offers:
        why = "; ".join(f"{number} rows left out: {reason}" for reason, number in reading.left_out.items())
        raise ValueError(f"{source}: no offer is in it{f' ({why})' if why else ''}")
    return reading


def parse_table(text: str, name: str) -> Reading:
    """The offers of a table's text; `name` stands in errors."""
    lines = csv.reader(io.StringIO(text), strict=True)
    reading, machines = Reading(), dict[tuple[str, ...], _Machine | str]()
    try:
        header = [_ALSO_CALLED.get(column.strip(), column.strip()) for column in next(lines, [])]
        pick, width = _picker(header), len(header)
        for row in lines:
            if len(row) == width:
                _read_row(pick((*row, "")), machines, reading)
            elif row:
                raise ValueError(f"{len(row)} columns, and the first line has {width}: {shown(','.join(row))}")
    except csv.Error as error:
        raise ValueError(f"{name}:{lines.line_num}: not CSV: {error}") from error
    except ValueError as error:
        raise ValueError(f"{name}:{lines.line_num}: {error}") from error
    return reading


def table_text(offers: Iterable[Offer]) -> str:
    """Offers as a table that reads back as the same."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_fields(offer) for offer in offers)
    return text.getvalue()


def _fields(offer: Offer) -> Iterator[str]:
    yield from (offer.cloud, offer.machine, offer.accelerator.name, str(offer.count))
    yield f"{offer.accelerator.memory / 2**30:.1f}"
    yield str(offer.cores) if offer.cores else ""
    yield plain(offer.memory / 2**30) if offer.memory else ""
    yield from (offer.region, plain(offer.price), "" if offer.spot is None else plain(offer.spot))
    yield offer.date.isoformat()


def _picker(header: Sequence[str]) -> Callable[[tuple[str, ...]], tuple[str, ...]]:
    """Takes our columns out of a row, which has an empty cell at its end for those that are not there."""
    missing = [column for column in COLUMNS if column not in header and column not in _OPTIONAL]
    if missing:
        raise ValueError(
            f"no table of offers: {', '.join(missing)} missing in the first line {shown(','.join(header))}; "
            f"its columns are {','.join(COLUMNS)}"
        )
    return itemgetter(*(header.index(column) if column in header else len(header) for column in COLUMNS))


@dataclass(frozen=True)
class _Machine:
    """What the rows of one machine have in common: most rows of a table differ in region and price alone."""

    what: tuple[str, str, Accelerator, int, int, int]
    wires: tuple[float, str, float, str, bool]


def _read_row(cells: tuple[str, ...], machines: dict[tuple[str, ...], _Machine | str], reading: Reading) -> None:
    key, (region, price, spot, day) = cells[:7], cells[7:]
    found = machines.get(key)
    if found is None:
        found = machines[key] = _read_machine(*map(str.strip, key))
    region, price, spot = region.strip(), price.strip(), spot.strip()
    if isinstance(found, str):
        reading.left_out[found] += 1
    elif not region:
        reading.left_out["no region: it cannot be had at present"] += 1
    elif not price:
        reading.left_out["no price on demand"] += 1
    else:
        reading.offers.append(Offer(*found.what, region, _price(price), _spot(spot), *found.wires, _date(day.strip())))


def _read_machine(
    cloud: str, machine: str, named: str, number: str, size: str, cores: str, memory: str
) -> _Machine | str:
    """The machine of a row, or why it is left out."""
    if not cloud:
        raise ValueError("Cloud: is empty")
    if not machine:
        return "the price of an accelerator alone, without the machine it needs"
    count = _count(number)
    if not count:
        return "a part of an accelerator"
    machine, named = _slice(machine, named)
    node = find_node(cloud, machine)
    accelerator = _accelerator(node.accelerator or named, size)
    if accelerator is None:
        return f"unknown accelerator {named}"
    main_memory = round(_number(memory or "0", "MemoryGiB") * 2**30)
    network = node.network * (count if node.per_device else 1)
    link, link_kind = node.link or accelerator.link, node.link_kind or accelerator.link_kind
    return _Machine(
        (cloud, machine, accelerator, count, round(_number(cores or "0", "vCPUs")), main_memory),
        (link, link_kind, network, node.network_kind, node.assumed),
    )


def _slice(machine: str, named: str) -> tuple[str, str]:
    """Google names a part of a TPU pod by its accelerator, `tpu-v5p-8`, and calls every machine TPU-VM."""
    pod = re.fullmatch(r"(tpu-v\w+)-\d+", named)
    return (named if machine == "TPU-VM" else machine, pod[1]) if pod else (machine, named)


def _accelerator(named: str, size: str) -> Accelerator | None:
    """What a table means by a name: `A100` with 80 GiB is the A100-80GB, `A100-80GB` is so whatever the size."""
    fitting = variants(named)
    if len(fitting) == 1:
        return fitting[0]
    gib = _number(size or "0", "GpuMemGiB")
    nearest = min(fitting, key=lambda each: abs(each.memory / 2**30 - gib), default=None)
    if nearest and abs(nearest.memory / 2**30 - gib) < 0.15 * gib:
        return nearest
    return accelerators().get(named)


def _count(text: str) -> int:
    """How many accelerators; 0 for a part of one."""
    number = _number(text, "AcceleratorCount")
    if number == 0 or (number > 1 and number != int(number)):
        raise ValueError(f"AcceleratorCount: {shown(text)} is not a number of accelerators")
    return int(number)


def _price(text: str) -> float:
    price = _number(text, "Price")
    if price == 0:
        raise ValueError("Price: nothing is rented for nothing; leave it empty if it is not known")
    return price


def _spot(text: str) -> float | None:
    """None where the table has nothing, or 0, which some write for that."""
    return (_number(text, "SpotPrice") or None) if text else None


def _number(text: str, column: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ValueError(f"{column}: needs a number of at least 0, not {shown(text or None)}")
    return number


@lru_cache(maxsize=1024)
def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise ValueError(f"CatalogDate: needs a date such as 2026-08-22, not {shown(text or None)}") from None


def _text(source: str | Path) -> str:
    data = _download(source) if str(source).startswith(("http://", "https://")) else _load(Path(source))
    if len(data) > _LARGEST_TABLE:
        raise ValueError(f"{source}: larger than {_LARGEST_TABLE:,} bytes, so no table of offers")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not text but something binary (byte {error.start}); a table is CSV") from error


def _load(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST_TABLE + 1)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}; name a table of offers, or its http(s) address") from error


def _download(address: str | Path) -> bytes:
    from urllib.request import Request, urlopen  # a tenth of a second that reading a file can do without

    try:
        with urlopen(Request(str(address), headers={"User-Agent": "slipstream"}), timeout=_SECONDS) as answer:
            found: bytes = answer.read(_LARGEST_TABLE + 1)
            return found
    except (OSError, ValueError) as error:  # no such host, refused, silent, an error page, or no address at all
        reason = getattr(error, "reason", None) or error
        code = f"{error.code} " if hasattr(error, "code") else ""
        raise ValueError(
            f"{address}: cannot be read: {code}{reason}; is the address right, and the network up?"
        ) from error
