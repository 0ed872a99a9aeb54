"""Every example is run, as its reader would run it, on a shorter length."""

import json
from pathlib import Path

import pytest

from program import slipstream

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.yaml"))
SHORTER = {
    "next-token": ["data.validation=0.1%", "train.tokens=40k", "train.sample.tokens=20", "train.evaluate.every=50%"],
    "masked-token": ["data.validation=0.1%", "train.tokens=40k", "train.evaluate.every=50%"],
    "classification": ["train.epochs=null", "train.samples=960"],
    "regression": ["train.epochs=2"],
    "own-model": ["train.steps=60"],
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path, tmp_path):
    settings = [word for setting in SHORTER[path.stem] for word in ("--set", setting)]
    done = slipstream("train", path, "--run-dir", "run", *settings, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-5:]) < sum(losses[:5]), "it learns"
    result = json.loads((tmp_path / "run/result.json").read_text())
    assert result["val_loss"] is not None
    assert (tmp_path / "run/export/model.safetensors").exists()
    if path.stem == "next-token":
        assert result["sample"].startswith("def read_") and "what it writes now" in done.stdout
