"""One side of `benchmarks/data.py` in a process of its own: writes its dataset, or reads it, timed."""

import json
import pickle
import re
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from reading import Reading, Side, numbers


def read(side: Side, reading: Reading, task: dict[str, Any]) -> dict[str, Any]:
    """Read until the end of the epoch or `stop` batches; leave the state after `save_after` of them."""
    kept = Path(task["state"])
    state = pickle.loads(kept.read_bytes()) if task["resume"] else None
    seen: list[list[int]] = []
    began = time.perf_counter()
    loader = side.Loader(reading, state)
    first: float | None = None
    samples = count = 0
    for count, batch in enumerate(loader, 1):
        first = first or time.perf_counter() - began
        samples += len(batch)
        if task["order"]:
            seen.append(numbers(batch))
        if count == task["save_after"]:
            kept.write_bytes(pickle.dumps(loader.state()))
        if count == task["stop"]:
            break
    whole = time.perf_counter() - began
    each = samples / max(count, 1)
    return {
        "first_s": first,
        "tokens_per_s": samples * reading.sequence / whole,
        "tokens_per_s_after_first": (samples - each) * reading.sequence / (whole - first) if first else None,
        "order": seen,
    }


def own_memory() -> int:
    """Bytes that are in memory only, not in files."""
    text = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * sum(map(int, re.findall(r"^Pss_(?:Anon|Shmem):\s+(\d+)", text, re.MULTILINE)))


def main() -> None:
    task = json.loads(sys.argv[1])
    reading = Reading(**task["reading"])
    side: Any = import_module(task["module"])
    if tokens := task.get("tokens"):
        rows = np.memmap(tokens, np.uint16, "r").reshape(-1, reading.sequence)[: reading.samples]
        side.write(rows, Path(reading.address), reading)
        return
    imported = own_memory() if task["memory"] else None
    Path(task["out"]).write_text(json.dumps({**read(side, reading, task), "imported": imported}))


if __name__ == "__main__":  # loaders with processes of their own may import this again
    main()
