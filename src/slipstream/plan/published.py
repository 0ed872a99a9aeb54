"""Published training results as the planner sees them: one row of a table becomes a model, a layout and a machine."""

import csv
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.plan.accelerators import Accelerator, find_accelerator
from slipstream.plan.grid import Grid, Hardware, Style
from slipstream.plan.work import Work, decoder_work

_NETWORK = {
    "A100": 25e9,
    "H100": 50e9,
    "H200": 50e9,
    "GH200": 25e9,
    "B200": 50e9,
    "GB200": 50e9,
    "B300": 100e9,
    "GB300": 100e9,
}
"""Bytes a second between machines for each accelerator, in the reference systems that vendors publish results of."""
_SHAPE = ("layers", "hidden", "heads", "ffn", "seq_len", "n_gpus")


class Unusable(Exception):
    """A row that does not say enough, or is about something else."""


@dataclass(frozen=True)
class Row:
    """One published run."""

    source: str
    group: tuple[Any, ...]
    """All but the layout: rows with the same one were runs of the same job on the same machines."""
    numbers: dict[str, float]
    seconds: float | None
    """Of a step."""
    memory: float | None
    """Bytes."""
    capacity: float
    """Bytes that an accelerator has."""
    says_recompute: bool = True
    """Whether it is known what was computed again."""


@dataclass(frozen=True)
class Table:
    """Rows as columns."""

    rows: list[Row]
    left_out: dict[str, int]
    """Why, and how many."""

    def column(self, name: str) -> Any:
        """One figure of all rows."""
        return np.array([row.numbers[name] for row in self.rows])

    def take(self, which: Iterable[bool]) -> "Table":
        """Some of the rows."""
        return Table([row for row, wanted in zip(self.rows, which, strict=True) if wanted], {})

    @property
    def work(self) -> Work:
        """The models."""
        c = self.column
        return decoder_work(
            c("layers"),
            c("hidden"),
            c("heads"),
            c("kv_heads"),
            c("inner"),
            c("inward"),
            c("vocabulary"),
            c("sequence_length"),
        )

    @property
    def grid(self) -> Grid:
        """The layouts."""
        return Grid(**{field.name: self.column(field.name) for field in fields(Grid)})

    @property
    def hardware(self) -> Hardware:
        """The machines."""
        return Hardware(**{field.name: self.column(field.name) for field in fields(Hardware)})

    @property
    def style(self) -> Style:
        """How their programs are written."""
        return Style(**{field.name: self.column(field.name) for field in fields(Style)})


def read_published(path: Path) -> Table:
    """Read a table in either of the two formats; what cannot be used is counted, with the reason."""
    try:
        with path.open(newline="") as file:
            lines = [{name: value or "" for name, value in line.items() if name} for line in csv.DictReader(file)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no table: {error}") from error
    if not lines:
        raise ValueError(f"{path} has no rows")
    single = "# GPUs" in lines[0]
    if not single and not {"source", "gpu", "hidden", "dp", "tp", "pp"} <= lines[0].keys():
        raise ValueError(f"{path} is no table of published results: its columns are {', '.join(lines[0])}")
    rows: list[Row] = []
    left_out: dict[str, int] = {}
    for line in lines:
        try:
            rows.append(_checked(_single_node(line) if single else _published(defaultdict(str, line))))
        except Unusable as why:
            left_out[str(why)] = left_out.get(str(why), 0) + 1
    return Table(rows, left_out)


_WHOLE = (
    "layers", "hidden", "heads", "kv_heads", "vocabulary", "sequence_length", "tensor", "pipeline", "context",
    "stages", "batch",
)  # fmt: skip
_POSITIVE = ("inner", "micro_batch", "replicate", "shard")


def _checked(row: Row) -> Row:
    """The same row. Raises Unusable if it describes what cannot be."""
    numbers = row.numbers
    for name in (*_WHOLE, *_POSITIVE):
        value = numbers[name]
        if not (0 < value < math.inf) or (name in _WHOLE and value != round(value)):
            raise Unusable(f"{name} is {value:g}")
    if row.seconds is not None and not 0 < row.seconds < math.inf:
        raise Unusable(f"a step takes {row.seconds:g} s")
    if numbers["hidden"] % numbers["tensor"] or numbers["heads"] % numbers["tensor"]:
        raise Unusable("tensor workers do not divide heads or width")
    if numbers["micro_batch"] * numbers["replicate"] * numbers["shard"] > 1.01 * numbers["batch"]:
        raise Unusable("a micro-batch is larger than a worker's share of the batch")
    return row


def _published(line: Mapping[str, str]) -> Row:
    if line["moe"] == "1":
        raise Unusable("mixture of experts")
    if "TPU" in line["gpu"]:
        raise Unusable("not a GPU")
    if line["task"] in ("lora", "qlora"):
        raise Unusable("trains adapters, not the model")
    if "+" in line["gpu"]:
        raise Unusable("several kinds of GPU at once")
    if missing := [name for name in _SHAPE if not line[name]]:
        raise Unusable(f"does not say {missing[0]}")
    accelerator, memory = _accelerator(line["gpu"])
    found: dict[str, Any] = defaultdict(lambda: None, {name: _number(line[name]) for name in line})
    if wrong := [name for name in _SHAPE if not found[name] or found[name] < 0]:
        raise Unusable(f"{wrong[0]} is {line[wrong[0]]!r}")
    if not found["global_batch"]:
        raise Unusable("does not say global_batch")
    tensor, pipeline, context = (found[name] or 1.0 for name in ("tp", "pp", "cp"))
    data = found["dp"] or found["n_gpus"] / (tensor * pipeline * context)
    if not found["micro_batch"] and pipeline > 1:
        raise Unusable("does not say micro_batch, which decides how long stages wait")
    numbers = _model(line, found)
    bits = _bits(line["precision"])
    peak = accelerator.peaks.get({4: "fp4", 8: "fp8"}.get(bits, "bf16")) or accelerator.peaks["bf16"]
    # Programs of the days before bf16 had no fused attention, and this one has none still.
    old = line["precision"].lower() == "fp16" or "Megatron-DeepSpeed" in line["notes"]
    numbers |= {
        "tensor": tensor, "pipeline": pipeline, "context": context, "stages": found["vpp"] or 1.0,
        "micro_batch": found["micro_batch"] or found["global_batch"] / data, "batch": found["global_batch"],
        "recompute": {"full": 2.0, "none": 0.0, "": 0.0}.get(line["act_ckpt"], 1.0), "first_in_first_out": 0.0,
        "fused": float(not old), "sequence": float(not old or "SP" in line["act_ckpt"]),
        "balanced": 0.0, **_sharding(line, data, context, old), **_links(line, accelerator),
        **({"kept_bytes": 1.0} if bits < 16 and "FSDP" not in line["sharding"] else {}),
        "peak": peak, "bits": float(bits), "peak_16": accelerator.peaks["bf16"], "memory": memory,
        "bandwidth": accelerator.bandwidth, "ahead": 1.0,
    }  # fmt: skip
    group = tuple(line[name] for name in ("source", "gpu", "n_gpus", "model", "seq_len", "global_batch", "precision"))
    held = found["memory_gb"]
    in_gib = "GiB" in line["notes"]
    return Row(
        line["source"],
        group,
        numbers,
        _seconds(line, found, numbers),
        held * (2**30 if in_gib else 1e9) if held else None,
        memory,
        bool(line["act_ckpt"]),
    )


def _single_node(line: dict[str, str]) -> Row:
    if wrong := [value for value in line.values() if _number(value) is None]:
        raise Unusable(f"{wrong[0]!r} is no number")
    gpus, batch, micro, hidden, heads, layers, sequence, tensor, data, pipeline, milliseconds = map(
        float, line.values()
    )
    accelerator, memory = _accelerator("A100-80GB")
    numbers = {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": heads, "inner": 4 * hidden, "inward": 1.0,
        "vocabulary": 51200.0, "sequence_length": sequence, "tensor": tensor, "pipeline": pipeline, "context": 1.0,
        "stages": 1.0, "micro_batch": micro, "batch": batch, "recompute": 0.0, "first_in_first_out": 0.0,
        "fused": 0.0, "sequence": 0.0, "balanced": 0.0, "replicate": data, "shard": 1.0, "sharded": 0.0, **_MEGATRON,
        "peak": accelerator.peaks["bf16"], "bits": 16.0, "peak_16": accelerator.peaks["bf16"], "memory": memory,
        "bandwidth": accelerator.bandwidth, "ahead": 1.0, "link": accelerator.link, "network": 1e11, "per_node": 8.0,
    }  # fmt: skip
    group = ("A100 single node", gpus, batch, hidden, heads, layers, sequence)
    return Row("A100 single node", group, numbers, milliseconds / 1e3, None, memory)


def _model(line: Mapping[str, str], found: dict[str, Any]) -> dict[str, float]:
    layers, hidden, heads, inner = (found[name] for name in ("layers", "hidden", "heads", "ffn"))
    kv_heads, vocabulary = found["kv_heads"] or heads, found["vocab"] or 50_000.0
    inward = 2.0 if "llama" in line["model"].lower() else 1.0
    if found["params"]:  # whether there is a gate shows in their number

        def apart(inward: float) -> float:
            work = decoder_work(layers, hidden, heads, kv_heads, inner, inward, vocabulary, 1.0)
            counts = (work.parameters, work.parameters - work.head_parameters)
            return float(min(abs(count / found["params"] - 1) for count in counts))

        inward = min((1.0, 2.0), key=apart)
    return {
        "layers": layers, "hidden": hidden, "heads": heads, "kv_heads": kv_heads, "inner": inner, "inward": inward,
        "vocabulary": vocabulary, "sequence_length": found["seq_len"],
    }  # fmt: skip


_MEGATRON = {
    "gradient_bytes": 2.0, "weight_bytes": 2.0, "stored_weight": 2.0, "master": 4.0, "stream_bytes": 2.0,
    "kept_bytes": 2.0, "keeps_gathered": 0.0, "kept_products": 0.5, "over_context": 1.0, "score_bytes": 6.0,
    "score_rows": math.inf, "compiled": 0.0, "waits": 1.0, "product_bytes": 2.0, "fragmented": 0.04,
    "eager": 0.0, "fixed_order": 0.0, "product_time": 1.0, "long_blocks": 0.0, "folds": 0.0,
    "turns_from": math.inf,
}  # fmt: skip
"""Bytes in programs that hold their weights in 16 bits beside an exact copy, and whose loss is fused."""


def _sharding(line: Mapping[str, str], data: float, context: float, old: bool) -> dict[str, float]:
    how = line["sharding"].lower()
    sharded = 3 if re.search("full_shard|fsdp|zero-3|zero3", how) else 1 if "dist" in how or "zero1" in how else 0
    if "grad_op" in how or "zero2" in how:
        sharded = 2
    if not how and not old:
        sharded = 1  # what the programs of today do unless told
    own = {"gradient_bytes": 4.0, "stored_weight": 4.0, "master": 0.0} if sharded >= 2 else {}
    own |= {"score_bytes": 12.0} if how == "fsdp2" else {}  # torch's plain loss works on fp32 copies
    split = {"replicate": 1.0, "shard": data} if sharded and data > 1 else {"replicate": data, "shard": 1.0}
    return {**split, "sharded": float(sharded if data * context > 1 else 0), **_MEGATRON, **own}


def _links(line: Mapping[str, str], accelerator: Accelerator) -> dict[str, float]:
    linked = float(accelerator.linked)
    per_node = _number(line["gpus_per_node"]) or 8.0
    text, network = line["inter_link"], _NETWORK.get(accelerator.name.partition("-")[0], 12.5e9) * per_node
    if found := re.search(r"(\d+)\s*x\s*(\d+)\s*Gb", text):
        network = int(found[1]) * int(found[2]) / 8 * 1e9
    elif found := re.search(r"(\d+)\s*Gb(?:ps|/s)\D*per GPU", text):
        network = per_node * int(found[1]) / 8 * 1e9
    elif found := re.search(r"(\d+)\s*Gbps/node", text):
        network = int(found[1]) / 8 * 1e9
    if linked > 16 and per_node > 1:  # a rack that is one machine to those in it
        network, per_node = network * linked / per_node, linked
    return {"link": accelerator.link, "network": network, "per_node": per_node}


def _seconds(line: Mapping[str, str], found: dict[str, Any], numbers: dict[str, float]) -> float | None:
    if found["iter_time_s"]:
        return float(found["iter_time_s"])
    tokens = numbers["batch"] * numbers["sequence_length"]
    if found["tokens_per_s_per_gpu"]:
        return float(tokens / (found["tokens_per_s_per_gpu"] * found["n_gpus"]))
    if found["tflops_per_gpu"] and re.search("recompute", line["notes"], re.IGNORECASE):
        # Four passes over the model with attention counted in full (Narayanan et al. 2021, arXiv 2104.04473, eq. 3).
        layers, hidden, vocabulary = (numbers[name] for name in ("layers", "hidden", "vocabulary"))
        shape = 1 + numbers["sequence_length"] / (6 * hidden) + vocabulary / (16 * layers * hidden)
        return float(96 * tokens * layers * hidden**2 * shape / (found["tflops_per_gpu"] * 1e12 * found["n_gpus"]))
    if not found["memory_gb"]:
        raise Unusable("gives no time, or TFLOP/s by a formula of its own")
    return None


def _accelerator(name: str) -> tuple[Accelerator, float]:
    base = name.partition(" ")[0].replace("GH-96", "GH200")
    size = re.search(r"(\d+)GB", name)
    named = re.match(r"[A-Za-z]+\d+[A-Za-z]?-\d+GB", base)
    for spelling in (base, named[0] if named else base, re.split(r"[-(]", base)[0]):
        try:
            found = find_accelerator(spelling)
        except ValueError:
            continue
        short = size and spelling.find(size[1]) < 0 and not base.startswith("H100-80")
        return found, float(size[1]) * 2**30 if size and short else float(found.memory)
    raise Unusable(f"unknown accelerator {name}")


def _bits(precision: str) -> int:
    lower = precision.lower()
    bits = 4 if "fp4" in lower else 8 if "fp8" in lower or "float8" in lower else 16
    if bits == 16 and lower and not re.search("bf16|fp16|bfloat16|float16|tf32|fp32|mixed", lower):
        raise Unusable(f"unknown precision {precision}")
    return bits


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
