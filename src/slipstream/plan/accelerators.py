"""What an accelerator can do: memory, rates, links. Every row of `tables/accelerators.csv` has its source and date.

Memory is what a program finds (what the driver reports, where that is known; `memory_basis` says which), which is less
than the round number of the advertisement. Rates are dense: a vendor's figures "with sparsity" are halved. Rates of
16 bits and fewer are those that add up in fp32, as training does. A link's rate is one direction's, of one device.
The date is the document's, as exact as it is known.
"""

import csv
import difflib
import re
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8", "fp4")
"""The columns of rates."""


@dataclass(frozen=True)
class Accelerator:
    """One kind of device that trains."""

    name: str
    kind: str
    """gpu, tpu or cpu."""
    memory: int
    """Bytes a program can have."""
    bandwidth: float
    """Bytes a second to and from that memory."""
    peaks: dict[str, float] = field(hash=False)
    """FLOP/s by precision, dense; what the device does not have is not in it."""
    link: float
    """Bytes a second to the others in a machine, one direction."""
    link_kind: str
    """NVLink4, PCIe5, ICI …"""
    linked: int
    """Devices that this link can join: a machine's, a rack's (GB200) or a pod's (TPUs)."""
    source: str
    """The vendor's document."""
    date: str
    """Of that document: year, or year and month."""


@cache
def accelerators() -> dict[str, Accelerator]:
    """All that are known, by name."""
    return {row["name"]: _accelerator(row) for row in _rows()}


def find_accelerator(name: str) -> Accelerator:
    """The accelerator that a person means: `h100`, `A100 80GB`, `NVIDIA A100-SXM4-80GB` … Raises ValueError."""
    if found := _spellings().get(_key(name)):
        return accelerators()[found]
    if several := variants(name):
        names = ", ".join(each.name for each in several)
        raise ValueError(f"{name!r} is the name of several accelerators; say which: {names}")
    known = list(accelerators())
    lower = {each.lower(): each for each in known}
    near = [lower[each] for each in difflib.get_close_matches(name.lower(), list(lower), n=3, cutoff=0.55)]
    hint = f" (did you mean {' or '.join(map(repr, near))}?)" if near else ""
    raise ValueError(f"unknown accelerator {name!r}{hint}; known: {', '.join(known)}")


def variants(name: str) -> list[Accelerator]:
    """All that bear a name or continue it: `A100` is A100-40GB, A100-80GB, …; `H100` is H100, H100-PCIe, …"""
    key = _key(name)
    found = _spellings().get(key)
    if found and _key(found) != key:
        return [accelerators()[found]]  # `H100-SXM` and the like mean exactly one
    start = f"{found or name}-".lower()
    return [each for each in accelerators().values() if f"{each.name}-".lower().startswith(start)]


def _rows() -> list[dict[str, str]]:
    with (files("slipstream.plan") / "tables" / "accelerators.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _accelerator(row: dict[str, str]) -> Accelerator:
    return Accelerator(
        name=row["name"],
        kind=row["kind"],
        memory=int(row["memory"]),
        bandwidth=float(row["bandwidth"]),
        peaks={precision: float(row[precision]) * 1e12 for precision in PRECISIONS if row[precision]},
        link=float(row["link"]),
        link_kind=row["link_kind"],
        linked=int(row["linked"]),
        source=row["source"],
        date=row["date"],
    )


@cache
def _spellings() -> dict[tuple[str, ...], str]:
    """Every way to write a name that is known, as the words in it."""
    return {
        _key(spelling): row["name"]
        for row in _rows()
        for spelling in (row["name"], *row["aliases"].split("|"))
        if spelling
    }


_MAKERS = {
    "nvidia", "tesla", "geforce", "quadro", "amd", "instinct", "google", "cloud", "tpu", "gpu", "tensor", "core",
    "hbm", "blackwell", "server", "edition", "generation",
}  # fmt: skip
"""Words that tell nothing apart."""


def _key(name: str) -> tuple[str, ...]:
    """The words of a name without order and decoration, so that `A100-SXM4-80GB` and `a100 80g sxm` are the same."""
    text = re.sub(r"(sxm|hbm)\d+e?", r"\1", name.lower())
    text = re.sub(r"(\d)\s*(?:g|gb|gib)\b", r"\1gb", text)
    text = re.sub(r"(rtx|pro|tpu)", r"\1 ", text)
    return tuple(sorted(word for word in re.findall(r"[a-z]+|\d+", text) if word not in _MAKERS))
