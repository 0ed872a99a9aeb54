"""Small jobs that tests are made from."""

import copy
import json
import random
from pathlib import Path
from typing import Any

from slipstream.job import Job

WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "wizards", "quietly", "mix",
    "blue", "ink", "and", "count", "stars",
)  # fmt: skip


def write_documents(path: Path, count: int = 80) -> Path:
    """Documents of very unequal length, the same each time."""
    draw = random.Random(1)
    with path.open("w") as file:
        for _ in range(count):
            file.write(json.dumps({"text": " ".join(draw.choices(WORDS, k=draw.randint(2, 40)))}) + "\n")
    return path


def merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`base` with dotted keys changed."""
    merged = copy.deepcopy(base)
    for key, value in changes.items():
        target = merged
        *parents, last = key.split(".")
        for parent in parents:
            target = target.setdefault(parent, {})
        target[last] = value
    return merged


def decoder_job(documents: Path, **changes: Any) -> Job:
    """A tiny decoder on documents of unequal length, each one sample, with dropout."""
    base = {
        "name": "decoder",
        "seed": 7,
        "model": {"kind": "decoder", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "dropout": 0.1},
        "data": {"source": str(documents), "sequence": 24, "vocabulary": 300, "pack": False, "validation": 0.1},
        "train": {
            "steps": 30,
            "batch": 8,
            "optimizer": {"name": "adamw", "lr": 1e-3},
            "schedule": {"decay": "cosine", "warmup": "10%"},
            "clip": {"norm": 1.0},
            "precision": "fp64",
            "evaluate": {"every": 10},
        },
        "checkpoint": {"every": 10, "keep": 2},
    }
    return Job.model_validate(merge(base, changes))


def resnet_job(**changes: Any) -> Job:
    """A narrow ResNet-18 with synchronised batch norm."""
    base = {
        "name": "resnet",
        "seed": 3,
        "model": {"kind": "resnet", "depth": 18, "width": 4, "stem": "small"},
        "data": {"source": "digits", "validation": 0.05},
        "train": {
            "steps": 30,
            "batch": 14,
            "optimizer": {"name": "nesterov", "lr": 0.02},
            "precision": "fp64",
            "evaluate": {"every": 10},
        },
        "checkpoint": {"every": 15},
    }
    return Job.model_validate(merge(base, changes))


def mlp_job(**changes: Any) -> Job:
    """An mlp with dropout on synthetic numbers."""
    return Job.model_validate(mlp_values(**changes))


def mlp_values(**changes: Any) -> dict[str, Any]:
    """The same, as it stands in a file."""
    base = {
        "name": "mlp",
        "seed": 5,
        "model": {"kind": "mlp", "hidden": [24, 24], "dropout": 0.2},
        "data": {"source": "synthetic", "samples": 200, "validation": 0.1},
        "train": {
            "steps": 30,
            "batch": 12,
            "optimizer": {"name": "adam", "lr": 3e-3},
            "l1": 1e-4,
            "l2": 1e-3,
            "precision": "fp64",
            "evaluate": {"every": 10},
        },
        "checkpoint": {"every": 15},
    }
    return merge(base, changes)
