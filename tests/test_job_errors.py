"""A wrong job file is refused with the file, the line, the key, the reason and the nearest valid name."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from program import slipstream
from slipstream.job import Job, JobError, load_job, read_job
from slipstream.job.codecs import TopK
from slipstream.job.file import Problem

TEXT = """\
name: words
model:
  kind: decoder
  layers: 2
  hidden: 32
  heads: 4
data:
  source: python-stdlib
  sequence: 24
train:
  steps: 30
  batch: 8
  optimizer:
    name: adamw
    lr: 1e-3
  schedule:
    decay: cosine
    warmup: 5%
"""
DIGITS = """\
name: digits
model:
  kind: resnet
  width: 4
data:
  source: digits
train:
  epochs: 2
  batch: 16
  optimizer:
    name: nesterov
    lr: 0.1
"""
NUMBERS = """\
name: numbers
model:
  kind: mlp
  hidden: [8, 8]
data:
  source: synthetic
train:
  epochs: 2
  batch: 16
  optimizer:
    name: adam
    lr: 0.1
"""
MODEL, DATA = TEXT[TEXT.index("model:") : TEXT.index("data:")], TEXT[TEXT.index("data:") : TEXT.index("train:")]
TRAIN = TEXT[TEXT.index("train:") :]
DECODER, MLP = "kind: decoder\n  layers: 2\n  hidden: 32\n  heads: 4", "kind: mlp\n  hidden: [8, 8]"
JARGON = ("Input should", "validation error", "pydantic", "type=", "Value error", "union", "tuple", "literal",
          "unable", "None", "True", "False", "dict[", "Traceback")  # fmt: skip


def write(folder: Path, text: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(text)
    return path


def problems_of(path: Path, *overrides: str) -> tuple[Problem, ...]:
    """What is wrong with a job; every problem reads like plain English."""
    with pytest.raises(JobError) as refused:
        load_job(path, overrides)
    for problem in refused.value.problems:
        where = problem.where.removeprefix(f"{path}:")
        assert where.isdigit() or where.startswith("--set "), problem
        assert str(problem).startswith(f"{problem.where}: ")
        assert problem.key in str(problem)
        assert not [word for word in JARGON if word in str(problem)], problem
        assert "\n" not in str(problem)
    assert str(refused.value) == "\n".join(map(str, refused.value.problems))
    return refused.value.problems


def changed(base: str, old: str, new: str) -> str:
    assert base.count(old) == 1, f"{old!r} must stand in the file once"
    return base.replace(old, new)


# --- one change to a good file: (file, what is replaced, by what, line, key, words of the message) -------------------

UNKNOWN_KEYS = [
    (TEXT, "name: words", "naem: words\nname: words", 1, "naem", ["unknown key", "'name'", "checkpoint"]),
    (TEXT, "data:", "dataa: {}\ndata:", 7, "dataa", ["unknown key", "'data'"]),
    (TEXT, "layers: 2", "layers: 2\n  layer: 2", 5, "model.layer", ["unknown key", "'layers'", "kv_heads"]),
    (TEXT, "layers: 2", "layers: 2\n  depth: 2", 5, "model.depth", ["unknown key", "belongs to resnet"]),
    (TEXT, "sequence: 24", "seqence: 24", 9, "data.seqence", ["unknown key", "'sequence'", "vocabulary"]),
    (TEXT, "sequence: 24", "path: x", 9, "data.path", ["unknown key", "belongs to mnist"]),
    (TEXT, "batch: 8", "batch: 8\n  clipp: {norm: 1}", 13, "train.clipp", ["unknown key", "'clip'"]),
    (TEXT, "batch: 8", "batch: 8\n  clip: {nrm: 1}", 13, "train.clip.nrm", ["unknown key", "'norm'"]),
    (TEXT, "batch: 8", "batch: 8\n  evaluate:\n    evry: 1", 14, "train.evaluate.evry", ["'every'", "samples"]),
    (TEXT, "lr: 1e-3", "lr: 1e-3\n    beta: [0, 0]", 16, "train.optimizer.beta", ["unknown key", "'betas'"]),
    (TEXT, "lr: 1e-3", "lr: 1e-3\n    momentum: 0.9", 16, "train.optimizer.momentum", ["momentum, nesterov, lars"]),
    (NUMBERS, "lr: 0.1", "lr: 0.1\n    momentum: 0.9", 13, "train.optimizer.momentum", ["momentum, nesterov, lars"]),
    (NUMBERS, "name: adam", "name: sgd\n    momentum: 0.9", 12, "train.optimizer.momentum", ["lr, name"]),
    (TEXT, "warmup: 5%", "warmpu: 5%", 18, "train.schedule.warmpu", ["unknown key", "'warmup'", "floor"]),
    (TEXT, "warmup: 5%", "last: 5%", 18, "train.schedule.last", ["belongs to warmup-stable-decay"]),
    (TEXT, "train:", "limits: {dedline: 6h}\ntrain:", 10, "limits.dedline", ["unknown key", "'deadline'"]),
    (TEXT, "train:", "layout:\n  microbatch: 6\ntrain:", 11, "layout.microbatch", ["'micro_batch'", "replicate"]),
    (TEXT, "train:", "machines: {devise: cpu}\ntrain:", 10, "machines.devise", ["'device'"]),
    (TEXT, "train:", "exchange: {buckets: 1MB}\ntrain:", 10, "exchange.buckets", ["'bucket'"]),
    (TEXT, "train:", "exchange: {every: 8}\ntrain:", 10, "exchange.every", ["belongs to local (set kind)"]),
    (TEXT, "train:", "checkpoint: {eevry: 3}\ntrain:", 10, "checkpoint.eevry", ["'every'", "keep"]),
    (DIGITS, "width: 4", "stemm: small", 4, "model.stemm", ["'stem'"]),
    (DIGITS, "epochs: 2", "epochs: 2\n  task: {kind: classification, label_smooth: 0.1}",
     9, "train.task.label_smooth", ["'label_smoothing'"]),
    (NUMBERS, "source: synthetic", "import: a:b\n  arg: {}", 7, "data.arg", ["'args'"]),
    (NUMBERS, MLP, "import: a:b\n  target: c:d", 4, "model.target", ["unknown key", "import, args"]),
]  # fmt: skip

WRONG_NAMES = [
    (TEXT, "kind: decoder", "kind: decodr", 3, "model.kind", ["'decodr'", "'decoder'", "resnet, mlp, linear"]),
    (TEXT, "kind: decoder", "kind: 5", 3, "model.kind", ["5 is not", "decoder, resnet"]),
    (TEXT, "kind: decoder", "kind: [decoder]", 3, "model.kind", ["['decoder'] is not", "decoder, resnet"]),
    (TEXT, "kind: decoder", "kind:", 3, "model.kind", ["needs kind", "decoder, resnet"]),
    (TEXT, "name: adamw", "name: AdamV", 14, "train.optimizer.name", ["'AdamV'", "'adam", "lars, lamb"]),
    (TEXT, "source: python-stdlib", "source: python-stdlb", 8, "data.source", ["'python-stdlib'", ".jsonl"]),
    (TEXT, "source: python-stdlib", "source: words", 8, "data.source", ["unknown source 'words'", "a folder/"]),
    (TEXT, "source: python-stdlib", "source: my/table.cvs", 8, "data.source", ["'my/table.cvs'", "'.csv'"]),
    (TEXT, "source: python-stdlib", "source: 5", 8, "data.source", ["needs source", "synthetic"]),
    (TEXT, "layers: 2", "preset: gpt2", 4, "model.preset", ["'gpt2'", "did you mean 'gpt2-124m'", "llama-8b"]),
    (TEXT, "layers: 2", "preset: [llama-1b]", 4, "model.preset", ["['llama-1b'] is not known", "llama-8b"]),
    (TEXT, "batch: 8", "batch: 8\n  task: next-tokens", 13, "train.task", ["'next-tokens'", "'next-token'"]),
    (TEXT, "batch: 8", "batch: 8\n  task:\n    kind: nxt-token", 14, "train.task.kind", ["'next-token'", "regression"]),
    (TEXT, "decay: cosine", "decay: cosin", 17, "train.schedule.decay", ["'cosin'", "'cosine'", "warmup-stable-decay"]),
    (TEXT, "batch: 8", "batch: 8\n  precision: bf-16", 13, "train.precision", ["'bf-16'", "'bf16'", "tf32"]),
    (TEXT, "batch: 8", "batch: 8\n  precision: 16", 13, "train.precision", ["16 is not", "'fp16'"]),
    (TEXT, "batch: 8", "batch: 8\n  on_nonfinite: ignore", 13, "train.on_nonfinite", ["stop, skip, warn"]),
    (TEXT, "heads: 4", "heads: 4\n  positions: rotery", 7, "model.positions", ["'rotary'"]),
    (DIGITS, "width: 4", "depth: 34", 4, "model.depth", ["34 is not", "18, 50"]),
    (DIGITS, "width: 4", "depth: '18'", 4, "model.depth", ["'18'", "in quotes", "18, 50"]),
    (TEXT, "train:", "machines: {device: gpu}\ntrain:", 10, "machines.device", ["'gpu'", "auto, cpu, cuda"]),
]

MISSING = [
    (TEXT, "name: words\n", "", 1, "name", ["is missing", "letters, digits"]),
    (TEXT, MODEL, "", 1, "model", ["is missing", "trained"]),
    (TEXT, DATA, "", 1, "data", ["is missing", "learned from"]),
    (TEXT, TRAIN, "", 1, "train", ["is missing", "recipe"]),
    (TEXT, "  kind: decoder\n", "", 2, "model", ["needs kind", "decoder", "import"]),
    (TEXT, "  layers: 2\n", "", 2, "model.layers", ["is missing", "transformer blocks"]),
    (TEXT, "  source: python-stdlib\n", "", 7, "data", ["needs source", "python-stdlib", "a path"]),
    (TEXT, "  batch: 8\n", "", 10, "train.batch", ["is missing", "over all workers"]),
    (TEXT, "  steps: 30\n", "", 10, "train", ["exactly one of tokens, samples, epochs, steps", "none"]),
    (TEXT, "    lr: 1e-3\n", "", 13, "train.optimizer.lr", ["is missing", "learning rate"]),
    (TEXT, "    name: adamw\n", "", 13, "train.optimizer", ["needs name", "adamw"]),
    (TEXT, "    decay: cosine\n", "", 16, "train.schedule", ["needs decay", "cosine"]),
    (TEXT, "decay: cosine", "decay: step", 16, "train.schedule.every", ["is missing", "one stair"]),
    (DIGITS, "source: digits", "source: mnist", 5, "data.path", ["is missing", "folder"]),
    (NUMBERS, "source: synthetic", "source: a.csv", 5, "data.target", ["is missing", "column to predict"]),
    (TEXT, "source: python-stdlib", "source: a.npy\n  tokens: true", 7, "data.vocabulary", ["is missing"]),
    (NUMBERS, "source: synthetic", "import: a:b", 7, "train.task", ["train.task is needed", "regression"]),
    (NUMBERS, "lr: 0.1", "lr: 0.1\n    betas: [0.9]", 13, "train.optimizer.betas[1]", ["is missing"]),
    (TEXT, "batch: 8", "batch: 8\n  ramp: {start: 2}", 13, "train.ramp.over", ["is missing", "Until when"]),
    (TEXT, "batch: 8", "batch: 8\n  sample: {tokens: 9}", 13, "train.sample.prompt", ["is missing"]),
]

WRONG_TYPES = [
    (TEXT, "name: words", "name: 2024", 1, "name", ["needs text", "2024", "quotes"]),
    (TEXT, "name: words", "name: [a]", 1, "name", ["needs text", "['a']"]),
    (TEXT, "name: words", "name: {a: 1}", 1, "name", ["needs text", "{'a': 1}"]),
    (TEXT, "name: words", "name:", 1, "name", ["needs text", "an empty value"]),
    (TEXT, "name: words", "name: my run", 1, "name", ["'my run'", "letters, digits"]),
    (TEXT, "name: words", "name: ../up", 1, "name", ["'../up'", "letters, digits"]),
    (TEXT, "name: words", "name: -words", 1, "name", ["'-words'", "letter or digit first"]),
    (TEXT, "name: words", "name: words\nseed: -1", 2, "seed", ["-1", "whole number of at least 0"]),
    (TEXT, "name: words", "name: words\nseed: abc", 2, "seed", ["'abc'", "write for example"]),
    (TEXT, "name: words", "name: words\nseed: true", 2, "seed", ["true is not a count"]),
    (TEXT, "name: words", "name: words\nseed: 1.5", 2, "seed", ["1.5", "whole number"]),
    (TEXT, "name: words", "name: words\nseed: 9223372036854775808", 2, "seed", ["too large"]),
    (TEXT, "layers: 2", "layers: two", 4, "model.layers", ["'two' is not a count", "write for example"]),
    (TEXT, "layers: 2", "layers: [2]", 4, "model.layers", ["[2] is not a count"]),
    (TEXT, "heads: 4", "heads: 4\n  bias: maybe", 7, "model.bias", ["needs true or false, not 'maybe'"]),
    (TEXT, "heads: 4", "heads: 4\n  norm_eps: 0", 7, "model.norm_eps", ["must be greater than 0, not 0"]),
    (TEXT, "heads: 4", "heads: 4\n  dropout: 1", 7, "model.dropout", ["must be less than 1, not 1"]),
    (TEXT, MODEL, "model: decoder\n", 2, "model", ["needs a mapping with keys, not 'decoder'", "needs kind"]),
    (TEXT, DATA, "data: [1]\n", 7, "data", ["needs a mapping", "needs source"]),
    (TEXT, TRAIN, "train: [1]\n", 10, "train", ["needs a mapping with keys, not [1]"]),
    (TEXT, "optimizer:\n    name: adamw\n    lr: 1e-3", "optimizer: adamw", 13, "train.optimizer",
     ["needs a mapping", "'adamw'", "needs name"]),
    (TEXT, "batch: 8", "batch: 8\n  clip: 1.0", 13, "train.clip", ["needs a mapping with keys, not 1"]),
    (TEXT, "batch: 8", "batch: 8\n  task: 5", 13, "train.task", ["needs", "not 5", "next-token"]),
    (TEXT, "train:", "limits:\ntrain:", 10, "limits", ["needs a mapping with keys, not an empty value"]),
    (TEXT, "sequence: 24", "pack: 2", 9, "data.pack", ["needs true or false, not 2"]),
    (TEXT, "lr: 1e-3", "lr: fast", 15, "train.optimizer.lr", ["'fast' is not a number", "3e-4"]),
    (TEXT, "lr: 1e-3", "lr: -1e-3", 15, "train.optimizer.lr", ["must be greater than 0, not -0.001"]),
    (TEXT, "lr: 1e-3", "lr: .inf", 15, "train.optimizer.lr", ["inf is not a number"]),
    (TEXT, "lr: 1e-3", "lr: .nan", 15, "train.optimizer.lr", ["nan is not a number"]),
    (TEXT, "lr: 1e-3", "lr: true", 15, "train.optimizer.lr", ["true is not a number"]),
    (TEXT, "lr: 1e-3", "lr: {peak: 1}", 15, "train.optimizer.lr", ["{'peak': 1} is not a number"]),
    (TEXT, "lr: 1e-3", "lr: 1\n    weight_decay: -1", 16, "train.optimizer.weight_decay", ["at least 0, not -1"]),
    (NUMBERS, "lr: 0.1", "lr: 0.1\n    betas: 0.9", 13, "train.optimizer.betas", ["needs a list", "not 0.9"]),
    (NUMBERS, "lr: 0.1", "lr: 0.1\n    betas: [0.9, 2]", 13, "train.optimizer.betas[1]", ["less than 1, not 2"]),
    (NUMBERS, "lr: 0.1", "lr: 0.1\n    betas: [0, 0, 0]", 13, "train.optimizer.betas", ["at most 2 values, not 3"]),
    (NUMBERS, "name: adam", "name: momentum\n    momentum: 2", 12, "train.optimizer.momentum", ["less than 1, not 2"]),
    (NUMBERS, "hidden: [8, 8]", "hidden: 8", 4, "model.hidden", ["needs a list", "not 8"]),
    (NUMBERS, "hidden: [8, 8]", "hidden:\n  - 8\n  - wide", 6, "model.hidden[1]", ["'wide' is not a count"]),
    (NUMBERS, "source: synthetic", "source: a.csv\n  target: y\n  inputs: []", 8, "data.inputs", ["at least 1 value"]),
    (NUMBERS, "source: synthetic", "import: parity", 6, "data.import", ["'parity'", "package.module:name"]),
    (NUMBERS, "source: synthetic", "import: a:b\n  args: 5", 7, "data.args", ["needs a mapping with keys, not 5"]),
    (NUMBERS, MLP, "import: parity", 3, "model.import", ["'parity'", "package.module:name"]),
    (NUMBERS, MLP, "huggingface: 5", 3, "model.huggingface", ["local folder", "model_type"]),
    (NUMBERS, MLP, "huggingface: {a: 1}", 3, "model.huggingface", ["model_type: bert"]),
    (TEXT, "source: python-stdlib", "source: a.npy\n  vocabulary: 9\n  tokens: 5", 10, "data.tokens", ["valid: true"]),
    (TEXT, "data:", "1: 2\ndata:", 7, "[1]", ["a key is text, not 1", "quotes"]),
]  # fmt: skip

WRONG_UNITS = [
    (TEXT, "steps: 30", "tokens: 20X", 11, "train.tokens", ["'20X' is not a count", "20M"]),
    (TEXT, "steps: 30", "tokens: 20m", 11, "train.tokens", ["'20m' is not a count", "20M"]),
    (TEXT, "steps: 30", "tokens: 1,5k", 11, "train.tokens", ["'1,5k' is not a count"]),
    (TEXT, "steps: 30", "steps: 1.5", 11, "train.steps", ["1.5 is not a whole number"]),
    (TEXT, "steps: 30", "steps: .inf", 11, "train.steps", ["inf is not a count"]),
    (TEXT, "steps: 30", "epochs: 0", 11, "train.epochs", ["must be greater than 0"]),
    (TEXT, "steps: 30", "epochs: .inf", 11, "train.epochs", ["inf is not a number"]),
    (TEXT, "batch: 8", "batch: 0", 12, "train.batch", ["0 is not a whole number of at least 1"]),
    (TEXT, "batch: 8", "batch: -3", 12, "train.batch", ["-3 is not a whole number of at least 1"]),
    (TEXT, "batch: 8", "batch: 1e400", 12, "train.batch", ["'1e400' is too large"]),
    (TEXT, "batch: 8", f"batch: 1{'0' * 400}", 12, "train.batch", ["is too large"]),
    (TEXT, "batch: 8", "batch:", 12, "train.batch", ["an empty value is not a count"]),
    (TEXT, "train:", "limits: {deadline: 6}\ntrain:", 10, "limits.deadline", ["6 is not a duration", "6h"]),
    (TEXT, "train:", "limits: {deadline: 80 parsecs}\ntrain:", 10, "limits.deadline", ["'80 parsecs'", "6h"]),
    (TEXT, "train:", "limits: {deadline: -3h}\ntrain:", 10, "limits.deadline", ["'-3h' is not a duration"]),
    (
        TEXT,
        "train:",
        "limits: {budget: lots}\ntrain:",
        10,
        "limits.budget",
        ["'lots' is not an amount of money", "$50"],
    ),
    (TEXT, "train:", "limits: {budget: $0}\ntrain:", 10, "limits.budget", ["'$0'", "positive", "$50"]),
    (TEXT, "train:", "exchange: {bucket: 25 parsecs}\ntrain:", 10, "exchange.bucket", ["is not a size", "25MB"]),
    (TEXT, "train:", "checkpoint: {every: 80 parsecs}\ntrain:", 10, "checkpoint.every", ["5% or 200 steps or 10m"]),
    (TEXT, "train:", "checkpoint: {every: 0%}\ntrain:", 10, "checkpoint.every", ["'0%' cannot be used here"]),
    (TEXT, "train:", "checkpoint: {keep: 0}\ntrain:", 10, "checkpoint.keep", ["at least 1"]),
    (TEXT, "sequence: 24", "validation: 150%", 9, "data.validation", ["'150%' is outside 0% to 100%"]),
    (TEXT, "sequence: 24", "validation: 5", 9, "data.validation", ["5 is outside 0% to 100%", "1%"]),
    (TEXT, "sequence: 24", "validation: 100%", 9, "data.validation", ["must be less than 1"]),
    (TEXT, "sequence: 24", "validation: 5 apples", 9, "data.validation", ["is not a fraction", "1% or 0.01"]),
    (TEXT, "warmup: 5%", "warmup: 5 minutes", 18, "train.schedule.warmup", ["5% or 10k samples"]),
    (TEXT, "warmup: 5%", "warmup: 10 steps", 18, "train.schedule.warmup", ["cannot be used here", "10k samples"]),
    (TEXT, "warmup: 5%", "warmup: 150%", 18, "train.schedule.warmup", ["'150%' is outside"]),
    (TEXT, "batch: 8", "batch: 8\n  evaluate: {every: 10m}", 13, "train.evaluate.every", ["5% or 200 steps"]),
    (TEXT, "batch: 8", "batch: 8\n  task: {kind: masked-token, mask: 0}", 13, "train.task.mask", ["greater than 0"]),
]

# Settings that contradict each other, or have no effect.
CONFLICTS = [
    (TEXT, "steps: 30", "steps: 30\n  tokens: 20M", 10, "train", ["exactly one", "tokens and steps", "remove one"]),
    (TEXT, "heads: 4", "heads: 5", 6, "model.heads", ["heads (5) must divide hidden (32)"]),
    (TEXT, "heads: 4", "heads: 32", 6, "model.heads", ["head size of 1", "even"]),
    (TEXT, "heads: 4", "heads: 4\n  kv_heads: 3", 7, "model.kv_heads", ["kv_heads (3) must divide heads (4)"]),
    (TEXT, "heads: 4", "heads: 4\n  positions: learned\n  rope_theta: 5", 8, "model.rope_theta", ["no effect"]),
    (TEXT, "heads: 4", "heads: 4\n  context: 16", 10, "data.sequence", ["(24)", "longer than model.context (16)"]),
    (TEXT, "source: python-stdlib", "source: a.txt\n  field: body", 9, "data.field", [".jsonl"]),
    (TEXT, "sequence: 24", "vocabulary: 999\n  tokenizer: t.json", 9, "data.vocabulary", ["no effect", "tokenizer"]),
    (TEXT, "sequence: 24", "vocabulary: 100", 9, "data.vocabulary", ["at least 258"]),
    (NUMBERS, "source: synthetic", "source: a.npy\n  target: b.npy\n  inputs: [x]", 8, "data.inputs", ["no effect"]),
    (NUMBERS, "source: synthetic", "source: a.csv\n  target: y\n  inputs: [x, y]", 7, "data.target", ["in inputs"]),
    (TEXT, "batch: 8", "batch: 8\n  evaluate: {every: 5}", 13, "train.evaluate", ["no effect", "data.validation"]),
    (DIGITS, "epochs: 2", "tokens: 1k", 8, "train.tokens", ["made of tokens", "samples, epochs or steps"]),
    (NUMBERS, "batch: 16", "batch: 16\n  sample: {prompt: hi}", 10, "train.sample", ["next-token on text"]),
    (DIGITS, "train:", "layout: {micro_batch: 4}\ntrain:", 7, "layout.micro_batch", ["batch norm", "norm: group"]),
    (TEXT, "train:", "machines: {device: cpu}\ntrain:\n  precision: tf32", 12, "train.precision", ["NVIDIA", "fp32"]),
    (DIGITS, "kind: resnet\n  width: 4", "kind: decoder\n  preset: gpt2-124m", 3, "model.kind", ["cannot do class"]),
    (NUMBERS, MLP, "kind: resnet", 3, "model.kind", ["takes images", "synthetic has none"]),
    (TEXT, DECODER, "kind: mlp", 3, "model.kind", ["numbers, not tokens"]),
    (TEXT.replace(DECODER, "import: a:b"), "train:\n", "  pack: false\ntrain:\n  task: masked-token\n",
     9, "train.task", ["data.pack: true"]),
    (TEXT, "batch: 8", "batch: 8\n  task: classification", 13, "train.task", ["does not fit data.source"]),
    (DIGITS, "batch: 16", "batch: 16\n  task: regression", 10, "train.task", ["does not fit", "'digits'", "classes"]),
    (TEXT, "steps: 30", "epochs: 3\n  ramp: {start: 8, over: 50%}", 12, "train.ramp.start", ["smaller than batch (8)"]),
    (TEXT, "steps: 30", "epochs: 3\n  ramp: {start: 6, over: 50%}", 12, "train.ramp.stairs", ["(4)", "2 samples"]),
    (TEXT, "steps: 30", "steps: 30\n  ramp: {start: 2, over: 50%}", 12, "train.ramp", ["tokens, samples or epochs"]),
    (TEXT, "steps: 30", "epochs: 3\n  ramp: {start: 2, over: 0%}", 12, "train.ramp.over", ["'0%' cannot be used"]),
    (TEXT, "batch: 8", "batch: 8\n  clip: {norm: 1, value: 1}", 13, "train.clip", ["exactly one", "found both"]),
    (TEXT, "batch: 8", "batch: 8\n  clip: {}", 13, "train.clip", ["exactly one", "norm and value"]),
    (TEXT, "batch: 8", "batch: 8\n  batch: 9", 13, "train.batch", ["is written twice"]),
    (TEXT, "train:", "data:\n  source: python-stdlib\ntrain:", 10, "data", ["is written twice"]),
]  # fmt: skip


def _ids(rows: list[Any]) -> list[str]:
    return [f"{row[3]}-{row[4]}" for row in rows]


ROWS = UNKNOWN_KEYS + WRONG_NAMES + MISSING + WRONG_TYPES + WRONG_UNITS + CONFLICTS


@pytest.mark.parametrize(("base", "old", "new", "line", "key", "words"), ROWS, ids=_ids(ROWS))
def test_one_mistake_is_reported_with_line_key_and_remedy(
    base: str, old: str, new: str, line: int, key: str, words: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path, changed(base, old, new))
    [problem] = problems_of(path)
    assert (problem.where, problem.key) == (f"{path}:{line}", key)
    assert not [word for word in words if word not in problem.message], problem


@pytest.mark.parametrize("base", [TEXT, DIGITS, NUMBERS])
def test_the_files_are_right_before_the_change(base: str, tmp_path: Path) -> None:
    assert isinstance(load_job(write(tmp_path, base)), Job)


# --- on the command line: (file, --set, key, words of the message) ---------------------------------------------------

OVERRIDES = [
    (TEXT, "train.batch", "", ["key=value", "train.batch=64"]),
    (TEXT, "=3", "", ["key=value"]),
    (TEXT, "train..batch=3", "", ["key=value"]),
    (TEXT, "train.batch=[1", "train.batch", ["'[1' is not valid YAML"]),
    (TEXT, "name=2024-13-45", "name", ["not valid YAML"]),
    (TEXT, "train.bach=64", "train.bach", ["unknown key", "'batch'"]),
    (TEXT, "trian.batch=64", "trian", ["unknown key", "'train'"]),
    (TEXT, "train.batch=many", "train.batch", ["'many' is not a count"]),
    (TEXT, "train.batch=", "train.batch", ["an empty value is not a count"]),
    (TEXT, "train=5", "train", ["needs a mapping with keys, not 5"]),
    (TEXT, "model.heads=5", "model.heads", ["must divide hidden (32)"]),
    (TEXT, "model.kind=decodr", "model.kind", ["'decoder'"]),
    (TEXT, "train.clip.nrm=1", "train.clip.nrm", ["unknown key", "'norm'"]),
    (TEXT, "train.clip.norm=0", "train.clip.norm", ["must be greater than 0, not 0"]),
    (TEXT, "train.ramp.start=2", "train.ramp.over", ["is missing"]),
    (TEXT, "train.optimizer={name: adam, lr: -1}", "train.optimizer.lr", ["must be greater than 0, not -1"]),
    (TEXT, "train.optimizer.lr.peak=1", "train.optimizer.lr", ["{'peak': 1} is not a number"]),
    (TEXT, "train.precision=fp4", "train.precision", ["'fp4'", "tf32, bf16"]),
    (TEXT, "train.evaluate.every=5", "train.evaluate", ["data.validation"]),
    (NUMBERS, "model.hidden.0=5", "model.hidden", ["needs a list"]),
]


@pytest.mark.parametrize(("base", "override", "key", "words"), OVERRIDES, ids=[row[1] for row in OVERRIDES])
def test_a_wrong_override_is_reported_as_it_was_written(
    base: str, override: str, key: str, words: list[str], tmp_path: Path
) -> None:
    [problem] = problems_of(write(tmp_path, base), override)
    assert (problem.where, problem.key) == (f"--set {override}", key)
    assert not [word for word in words if word not in problem.message], problem


def test_an_override_goes_into_what_was_written_as_a_name_alone(tmp_path: Path) -> None:
    path = write(tmp_path, changed(TEXT, "train:", "exchange: {codec: topk}\ntrain:"))
    job = load_job(path, ["exchange.codec.part=10%", "train.schedule=cosine", "train.schedule.floor=10%"])
    assert job.exchange.codec == TopK(name="topk", part=0.1)
    assert (job.train.schedule.decay, job.train.schedule.floor) == ("cosine", 0.1)
    [problem] = problems_of(write(tmp_path, changed(TEXT, "train:", "exchange: local\ntrain:")), "exchange.every=4")
    assert problem.key == "exchange.every" and "belongs to local" in problem.message, "exchange has no short form"
    path = write(tmp_path, changed(TEXT, "train:", "exchange: {codec: topk}\ntrain:"))
    [problem] = problems_of(path, "exchange.codec.rank=2")
    assert problem.key == "exchange.codec.rank" and "belongs to powersgd" in problem.message


def test_an_override_takes_the_place_of_what_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path, changed(TEXT, "batch: 8", "batch: 0"))
    assert load_job(path, ["train.batch=16", "train.steps=null", "train.tokens=1M"]).train.tokens == 1_000_000
    [problem] = problems_of(path)
    assert problem.where == f"{path}:12"


def test_a_mistake_in_the_file_keeps_its_line_beside_an_override(tmp_path: Path) -> None:
    path = write(tmp_path, changed(TEXT, "lr: 1e-3", "lr: 0"))
    [problem] = problems_of(path, "train.optimizer.name=adam")
    assert (problem.where, problem.key) == (f"{path}:15", "train.optimizer.lr")


# --- all at once -----------------------------------------------------------------------------------------------------


def test_all_mistakes_are_reported_at_once(tmp_path: Path) -> None:
    text = changed(changed(changed(TEXT, "layers: 2", "layers: two"), "batch: 8", "bacth: 8"), "cosine", "cosin")
    problems = problems_of(write(tmp_path, text), "seed=-1")
    assert [(problem.where.split(":")[-1], problem.key) for problem in problems] == [
        ("--set seed=-1", "seed"),
        ("4", "model.layers"),
        ("10", "train.batch"),
        ("17", "train.schedule.decay"),
        ("12", "train.bacth"),
    ]


def test_all_contradictions_of_a_section_are_reported_at_once(tmp_path: Path) -> None:
    text = changed(TEXT, "heads: 4", "heads: 5\n  kv_heads: 3\n  positions: learned\n  rope_theta: 7")
    text = changed(text, "batch: 8", "batch: 8\n  tokens: 5\n  ramp: {start: 9, over: 1%}")
    keys = [problem.key for problem in problems_of(write(tmp_path, text))]
    assert keys == ["model.heads", "model.kv_heads", "model.rope_theta", "train", "train.ramp", "train.ramp.start"]


def test_all_contradictions_between_sections_are_reported_at_once(tmp_path: Path) -> None:
    text = changed(DIGITS, "batch: 16", "batch: 16\n  evaluate: {every: 5}\n  sample: {prompt: a}")
    text += "layout: {micro_batch: 4}\n"
    keys = [problem.key for problem in problems_of(write(tmp_path, text))]
    assert keys == ["train.evaluate", "train.sample", "layout.micro_batch"]


def test_keys_written_twice_do_not_hide_other_mistakes(tmp_path: Path) -> None:
    text = changed(TEXT, "batch: 8", "batch: 8\n  batch: 8\n  batch: none")
    problems = problems_of(write(tmp_path, text))
    assert [problem.where.split(":")[-1] for problem in problems] == ["13", "14", "14"]


# --- files that are no job files -------------------------------------------------------------------------------------

NOT_JOBS = [
    ("", 1, ["name: …", "it is empty"]),
    ("# only a comment\n", 1, ["it is empty"]),
    ("- name: a\n- name: b\n", 1, ["a mapping", "it holds [{'name': 'a'}"]),
    ("just words\n", 1, ["a mapping", "'just words'"]),
    ("name: a\nmodel:\n\tkind: mlp\n", 3, ["not valid YAML", "indent with spaces, not tabs"]),
    ("name: a\nmodel: [1,\n  2\ndata: 3\n", 4, ["not valid YAML", "starts on line 2", "expected ',' or ']'"]),
    ("name: a\nmodel: {kind: mlp\n", 3, ["not valid YAML", "starts on line 2"]),
    ("name: a\nmodel: kind: mlp\n", 2, ["not valid YAML", "mapping values are not allowed here"]),
    ("name: 'a\nmodel: b\n", 3, ["not valid YAML", "starts on line 1"]),
    ("name: a\n---\nname: b\n", 2, ["not valid YAML", "single document"]),
    ("name: *a\n", 1, ["not valid YAML", "undefined alias"]),
    ("name: !!python/name:os.system\n", 1, ["not valid YAML", "tag"]),
    ("{[a, b]: 1}\n", 1, ["not valid YAML", "unhashable key"]),
]


@pytest.mark.parametrize(("text", "line", "words"), NOT_JOBS)
def test_a_file_that_is_no_job_file(text: str, line: int, words: list[str], tmp_path: Path) -> None:
    path = write(tmp_path, text)
    [problem] = problems_of(path)
    assert problem.where == f"{path}:{line}"
    assert not [word for word in words if word not in problem.message], problem


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\xff\xfe", "is not a text file"),
        ("name: Größe".encode("latin-1"), "is not a text file"),
        (b"name: a\x00b\n", "is not valid YAML: unacceptable character"),
        (b"name: 2024-13-45\n", "is not valid YAML: month must be in 1..12"),
        (b"name: &a [*a]\n", "an alias stands in itself"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(content)
    with pytest.raises(JobError) as refused:
        load_job(path)
    assert str(refused.value).startswith(f"{path}: ")
    assert reason in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    write(tmp_path, TEXT)
    with pytest.raises(JobError, match=r"jbo\.yaml: there is no such file; did you mean job\.yaml\?"):
        load_job(tmp_path / "jbo.yaml")
    with pytest.raises(JobError, match=r"there is no such file; `slipstream init` writes one"):
        load_job(tmp_path / "elsewhere" / "x.yaml")
    with pytest.raises(JobError, match=r"cannot be read: Is a directory"):
        load_job(tmp_path)


# --- whatever is written, it is a job or a JobError ------------------------------------------------------------------

JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["1M", "5%", "$", "9h"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.integers(), inner, max_size=3),
    max_leaves=5,
)


def _paths(values: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    inner = values.items() if isinstance(values, dict) else ()
    return [path, *(deeper for key, value in inner for deeper in _paths(value, (*path, key)))]


@settings(max_examples=150, deadline=None)
@given(base=st.sampled_from([TEXT, DIGITS, NUMBERS]), data=st.data(), junk=JUNK)
def test_junk_in_any_place_is_refused_in_plain_words(base: str, data: st.DataObject, junk: Any) -> None:
    values = yaml.safe_load(base)
    *parents, last = data.draw(st.sampled_from(_paths(values)[1:]))
    target = values
    for parent in parents:
        target = target[parent]
    target[last] = junk
    try:
        read_job(yaml.safe_dump(values))
    except JobError as error:
        for problem in error.problems:
            assert problem.message
            assert not [word for word in JARGON[:5] if word in str(problem)]


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("abn:- \n\t[]{}&*!|>'\"%@`#,?01"), max_size=30))
def test_any_text_is_refused_in_one_way(text: str) -> None:
    with pytest.raises(JobError):
        read_job(text)


# --- the program -----------------------------------------------------------------------------------------------------


def test_the_program_refuses_a_wrong_job_and_writes_nothing(tmp_path: Path) -> None:
    write(tmp_path, changed(changed(TEXT, "batch: 8", "bacth: 8"), "heads: 4", "heads: four"))
    done = slipstream("train", "job.yaml", "--set", "seed=-1", cwd=tmp_path)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "the job cannot be run: 4 things to mend"
    assert lines[1].startswith("  --set seed=-1: seed: -1 is not a whole number")
    assert lines[2].startswith("  job.yaml:6: model.heads: 'four' is not a count")
    assert os.listdir(tmp_path) == ["job.yaml"]  # noqa: PTH208
