"""Workers of different speed: who takes how much, and that the curve is that of the even split."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from program import slipstream, write_job
from slipstream.job import Job
from slipstream.train.balance import shares

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=9), st.integers(1, 300), st.integers(1, 20))
def test_all_samples_are_taken_in_proportion(rates: list[float], size: int, unit: int) -> None:
    taken = shares(tuple(rates), size, unit)
    units = -(-size // unit)
    assert sum(taken) == size and min(taken) >= 0
    assert sum(each % unit != 0 for each in taken) <= 1
    if units >= len(rates):
        assert min(taken) > 0
        exact = [rate / sum(rates) * units for rate in rates]
        if min(exact) >= 1:
            assert all(abs(-(-each // unit) - wanted) < 1.001 for each, wanted in zip(taken, exact, strict=True))


def test_equal_rates_share_evenly() -> None:
    assert shares((1.0, 1.0, 1.0), 10) == (4, 3, 3)
    assert shares((3.0, 1.0), 16) == (12, 4)
    assert shares((100.0, 1.0, 1.0), 10) == (8, 1, 1)
    assert shares((3.0, 1.0), 16, unit=4) == (12, 4)


def test_the_slow_one_takes_less_and_the_curve_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BENCHMARKS / "peers"), os.environ.get("PYTHONPATH", "")]))
    even, balanced = (curve(tmp_path / name, {"balance": name == "balanced"}) for name in ("even", "balanced"))
    assert "share" not in even[0]
    first, *_, last = [line["share"] for line in balanced]
    assert first == 8 and last != 8, "the first worker is the slow one, or the other is"
    assert [line["loss"] for line in balanced] == pytest.approx([line["loss"] for line in even], rel=1e-9)
    assert [line["samples"] for line in balanced] == [line["samples"] for line in even]


def curve(folder: Path, exchange: dict[str, Any]) -> list[dict[str, Any]]:
    folder.mkdir()
    job = {
        "name": "unequal",
        "model": {"import": "sleepy:Sleepy", "args": {"seconds": 0.003, "mark": str(folder / "slow")}},
        "data": {"source": "digits", "validation": 0},
        "machines": {"device": "cpu"},
        "train": {
            "task": "classification",
            "steps": 40,
            "batch": 16,
            "precision": "fp64",
            "optimizer": {"name": "sgd", "lr": 0.05},
        },
        "exchange": exchange,
    }
    done = slipstream("train", write_job(folder, job), "--workers", "2", "--run-dir", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]


def test_what_it_does_not_go_with_is_refused(tmp_path: Path) -> None:
    values: dict[str, Any] = {
        "name": "unequal",
        "model": {"kind": "resnet", "depth": 18},
        "data": {"source": "digits"},
        "train": {"task": "classification", "steps": 1, "batch": 16, "optimizer": {"name": "sgd", "lr": 0.05}},
        "exchange": {"balance": True},
    }
    with pytest.raises(ValueError, match=r"exchange\.balance does not go with batch norm"):
        Job.model_validate(values)
    job = write_job(tmp_path, {**values, "model": {"kind": "mlp", "hidden": [16]}, "machines": {"device": "cpu"}})
    done = slipstream("train", job, "--layout", "shard=2", cwd=tmp_path)
    assert done.returncode == 2 and "exchange.balance is for workers that hold the whole model" in done.stderr
