"""How the machines of the clouds are wired: what price tables do not tell. Each row has its source and date.

`tables/nodes.csv` is read from the top, and the first row whose cloud and machine fit is taken; `*` stands for
anything. The last row fits all: a cautious guess, marked as assumed, as is every figure that no vendor documents.
Clouds that promise a burst are taken at their baseline, because training talks all the time.
"""

import csv
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files


@dataclass(frozen=True)
class Node:
    """One machine's wires."""

    cloud: str
    machine: str
    """The cloud's name for it, or a pattern."""
    accelerator: str | None
    """Which one is in it, where price tables name it too loosely; None to believe them."""
    link_kind: str | None
    link: float | None
    """Bytes a second of a device inside the machine, one direction, where it is not the accelerator's own link."""
    network: float
    """Bytes a second to other machines, one direction."""
    per_device: bool
    """Whether `network` is that of a device and not of the whole machine."""
    network_kind: str
    """EFA, InfiniBand, RoCE, GPUDirect-TCPX, Ethernet …"""
    assumed: bool
    """Whether the network is our guess."""
    source: str
    date: str
    """Year, or year and month."""


@cache
def nodes() -> tuple[Node, ...]:
    """All rows, in the order in which they are tried."""
    with (files("slipstream.plan") / "tables" / "nodes.csv").open(encoding="utf-8") as file:
        return tuple(_node(row) for row in csv.DictReader(file))


@cache
def find_node(cloud: str, machine: str) -> Node:
    """How this machine is wired, as far as is known."""
    return next(node for node in _rows_of(cloud) if fnmatchcase(machine, node.machine))


@cache
def _rows_of(cloud: str) -> tuple[Node, ...]:
    return tuple(node for node in nodes() if node.cloud in (cloud, "*"))


def _node(row: dict[str, str]) -> Node:
    assert row["network_per"] in ("node", "device") and row["assumed"] in ("yes", "no"), row
    return Node(
        cloud=row["cloud"],
        machine=row["machine"],
        accelerator=row["accelerator"] or None,
        link_kind=row["link_kind"] or None,
        link=float(row["link"]) if row["link"] else None,
        network=float(row["network"]),
        per_device=row["network_per"] == "device",
        network_kind=row["network_kind"],
        assumed=row["assumed"] == "yes",
        source=row["source"],
        date=row["date"],
    )
