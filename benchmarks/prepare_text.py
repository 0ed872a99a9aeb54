"""Preparing text: `slipstream data prepare` on all cores beside the library `tokenizers` on one thread."""

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from common import SLIPSTREAM, console, run_all, show
from memory import Peak
from slipstream.data.documents import Piece
from slipstream.data.tokenizer import train_tokenizer
from slipstream.plan import this_machine

_ALONE = """
import json, sys, time
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts, size = [], 0
for line in open(sys.argv[2], encoding="utf-8"):
    texts.append(json.loads(line)["text"])
began = time.perf_counter()
for start in range(0, len(texts), 64):
    tokenizer.encode_batch_fast(texts[start : start + 64], add_special_tokens=False)
print(time.perf_counter() - began)
"""


def measure_preparing(root: Path, size: int) -> list[dict[str, Any]]:
    """Bytes of text a second, all in, beside cores × that of one thread; and what so many threads do at a time, each in
    a process of its own, which is as much as there is to be had."""
    text, tokenizer, cores = write_text(root, size), make_tokenizer(root), this_machine().cores
    alone, crowded, whole = [], [], []
    for number in range(3):
        console.print(f"preparing, round {number + 1}", style="dim")
        alone.append(_bare(tokenizer, text, 1))
        crowded.append(_bare(tokenizer, text, cores))
        began = time.perf_counter()
        _prepare(root, text, tokenizer, f"prepared-{number}")
        whole.append(time.perf_counter() - began)
    length = text.stat().st_size
    result = {
        "bytes": length,
        "cores": cores,
        "tokenizers_on_one_thread_bytes_per_s": length / min(alone),
        "slipstream_bytes_per_s": length / min(whole),
        "tokenizers_on_all_cores_bytes_per_s": cores * length / min(crowded),
        "ratio": min(alone) / min(whole) / cores,
        "ratio_of_all_cores": min(crowded) / min(whole) / cores,
    }
    rates = (length / min(alone), cores * length / min(crowded), length / min(whole))
    row = (f"{length / 1e6:.0f}", *(f"{rate / 1e6:.2f}" for rate in rates))
    columns = ("MB of text", "tokenizers, one thread, MB/s", f"{cores} at a time", f"slipstream, {cores} workers")
    ratios = (f"{result['ratio']:.2f}", f"{result['ratio_of_all_cores']:.2f}")
    show("preparing: the whole command", (*columns, "of cores × one", "of all at a time"), [(*row, *ratios)])
    return [result]


def measure_preparing_memory(root: Path, size: int) -> list[dict[str, Any]]:
    """Memory of the command and its processes together, at most."""
    text, tokenizer, peak = write_text(root, size), make_tokenizer(root), Peak()
    began = time.perf_counter()
    _prepare(root, text, tokenizer, "prepared-large", peak)
    took = time.perf_counter() - began
    columns = ("MB of text", "seconds", "MB of all processes, files not counted")
    row = (f"{text.stat().st_size / 1e6:.0f}", f"{took:.0f}", f"{peak.bytes / 1e6:.0f}")
    show("preparing: memory at most", columns, [row])
    return [{"bytes": text.stat().st_size, "seconds": took, "peak_bytes": peak.bytes}]


def write_text(root: Path, size: int) -> Path:
    """Python's own library, again and again: a document for each file."""
    path, written = root / f"text-{size}.jsonl", 0
    if path.exists():
        return path
    with path.open("w", encoding="utf-8") as file:
        for text in _sources():
            written += file.write(json.dumps({"text": text}) + "\n")
            if written >= size:
                return path
    return path


def _sources() -> Iterator[str]:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")) + sorted(
        Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py")
    )
    for path in cycle(files):
        text = path.read_text(encoding="utf-8", errors="replace")
        if text:
            yield text


def make_tokenizer(root: Path) -> Path:
    path = root / "tokenizer.json"
    if not path.exists():
        texts = (Piece(text, True) for _, text in zip(range(300), _sources(), strict=False))
        train_tokenizer(texts, 8_000_000, 8192).save(str(path))
    return path


def _bare(tokenizer: Path, text: Path, processes: int) -> float:
    """Seconds for all of the text in each of so many processes at a time."""
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _ALONE, str(tokenizer), str(text)]
    started = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(processes)]
    return max(float(process.communicate()[0]) for process in started)


def _prepare(root: Path, text: Path, tokenizer: Path, name: str, peak: Peak | None = None) -> None:
    words = ["--tokenizer", str(tokenizer), "--workers", str(this_machine().cores)]
    command = [SLIPSTREAM, "data", "prepare", str(text), str(root / name), *words]
    run_all([command], [{}], root / "log", timeout=3600, peak=peak)
