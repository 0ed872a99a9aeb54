"""What encryption costs: an encrypted dataset beside a plain one, in turns, each in a process of its own."""

import os
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common import alternate, console, show
from loaders import OURS, Datasets, Shape, Turn
from slipstream.data.keys import KEY, new_key

_BATCHES = (8, 64)


def measure_encryption(root: Path, shape: Shape, pairs: int) -> list[dict[str, Any]]:
    """From a folder, a whole epoch from opening to its end: the median over pairs of neighbouring turns."""
    os.environ[KEY] = new_key()
    data = Datasets(root / "encryption", shape)
    data.make(OURS)
    results = [_compare(data, batch, pairs) for batch in _BATCHES]
    columns = ("batch", "plain, million tokens/s", "encrypted", "of plain, median", "all pairs")
    rows = [
        (
            str(each["batch"]),
            *(f"{median(each[side]) / 1e6:.0f}" for side in ("plain", "encrypted")),
            f"{each['ratio']:.2f}",
            ", ".join(f"{ratio:.2f}" for ratio in each["ratios"]),
        )
        for each in results
    ]
    show("encrypted beside plain, from a folder", columns, rows)
    return results


def _compare(data: Datasets, batch: int, pairs: int) -> dict[str, Any]:
    data.shape = replace(data.shape, batch=batch)
    found: dict[str, list[float]] = {side: [] for side in OURS}
    for side in alternate(OURS, pairs):
        console.print(f"{side}, batches of {batch}", style="dim")
        (read,) = data.read(Turn(side, 0))
        found[side].append(read["tokens_per_s"])
    plain, encrypted = found.values()
    ratios = [ours / theirs for ours, theirs in zip(encrypted, plain, strict=True)]
    return {"batch": batch, "plain": plain, "encrypted": encrypted, "ratios": ratios, "ratio": median(ratios)}
