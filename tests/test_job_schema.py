"""The schema that editors read, and the job as a value: it reads back as the same job, and nothing changes it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from jobs import merge
from program import slipstream
from slipstream.job import Job, JobError, dump, load_job, read_job
from slipstream.job.base import Section
from slipstream.job.models import PRESETS, DecoderModel
from slipstream.job.units import Span

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.yaml"))
TEXT = yaml.safe_load("""
name: words
model: {kind: decoder, layers: 2, hidden: 32, heads: 4}
data: {source: python-stdlib, sequence: 24}
train: {steps: 30, batch: 8, optimizer: {name: adamw, lr: 1e-3}}
""")
NUMBERS = yaml.safe_load("""
name: numbers
model: {kind: mlp, hidden: [8, 8]}
data: {source: synthetic}
train: {epochs: 2, batch: 16, optimizer: {name: adam, lr: 0.1}}
""")


def read(values: dict[str, Any]) -> Job:
    return read_job(yaml.safe_dump(values))


# --- the schema ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def schema(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = slipstream("schema", cwd=tmp_path_factory.mktemp("schema"))
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


def test_the_printed_schema_is_a_json_schema(schema: dict[str, Any]) -> None:
    assert schema["$schema"] == Draft202012Validator.META_SCHEMA["$id"]
    Draft202012Validator.check_schema(schema)


def test_every_default_fits_its_own_schema(schema: dict[str, Any]) -> None:
    defined = schema["$defs"]
    assert defined["Checkpoint"]["properties"]["every"]["default"] == "10%"
    assert defined["Limits"]["properties"]["step"]["default"] == "120s"
    for section in (schema, *defined.values()):
        for key, setting in section.get("properties", {}).items():
            if "default" in setting:
                found = Draft202012Validator({**setting, "$defs": defined}).iter_errors(setting["default"])
                assert [error.message for error in found] == [], key


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_fits_the_schema(path: Path, schema: dict[str, Any]) -> None:
    values = yaml.safe_load(path.read_text())
    assert [error.message for error in Draft202012Validator(schema).iter_errors(values)] == []
    assert [error.message for error in Draft202012Validator(schema).iter_errors(dump(load_job(path)))] == []


@pytest.mark.parametrize(
    ("base", "changes"),
    [
        (TEXT, {"model": {"kind": "decoder", "preset": "llama-1b"}}),
        (TEXT, {"train.schedule": "linear", "train.task": "next-token", "checkpoint.every": "10m"}),
        (TEXT, {"data": {"source": "a.npy", "tokens": True, "vocabulary": "10k"}}),
        (NUMBERS, {"data": {"source": "a.csv", "target": "y", "inputs": ["x"]}, "train.task": "regression"}),
        (NUMBERS, {"model": {"import": "a:b", "args": {"x": None}}}),
    ],
)
def test_what_is_a_job_fits_the_schema(base: dict[str, Any], changes: dict[str, Any], schema: dict[str, Any]) -> None:
    values = merge(base, changes)
    assert read(values)
    assert [error.message for error in Draft202012Validator(schema).iter_errors(values)] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"naem": "a"},
        {"name": 5},
        {"model.layer": 3},
        {"model": {"kind": "decoder", "layers": 2}},
        {"model.preset": "gpt-5"},
        {"model.kind": "decodr"},
        {"data": {"source": "digits", "sequence": 24}},
        {"train.optimizer.momentum": 0.9},
        {"train.schedule": "cosin"},
        {"train.precision": "fp4"},
        {"train.batch": [8]},
    ],
    ids=str,
)
def test_an_editor_shows_the_common_mistakes(changes: dict[str, Any], schema: dict[str, Any]) -> None:
    values = merge(TEXT, changes)
    with pytest.raises(JobError):
        read(values)
    assert not Draft202012Validator(schema).is_valid(values)


def _sections(kind: type[Section] = Section) -> Iterator[type[Section]]:
    for section in kind.__subclasses__():
        if section.__module__.startswith("slipstream.job"):
            yield section
            yield from _sections(section)


@pytest.mark.parametrize("section", sorted(set(_sections()), key=lambda section: section.__name__))
def test_every_setting_is_described(section: type[Section]) -> None:
    keys = {field.alias or name for name, field in section.model_fields.items()}
    assert all(text.strip() for text in section.descriptions().values()) and section.descriptions().keys() == keys
    assert section.__doc__ or section.__name__.startswith("_")


def test_every_setting_in_the_schema_is_described(schema: dict[str, Any]) -> None:
    sections = schema["$defs"]
    assert len(sections) > 25
    for section in (schema, *sections.values()):
        assert section["description"]
        for name, setting in section["properties"].items():
            described = setting if "$ref" not in setting else setting | sections[setting["$ref"].split("/")[-1]]
            assert described["description"], name


# --- the same job again ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_reads_back_as_the_same_job(path: Path) -> None:
    job = load_job(path)
    assert read(dump(job)) == job
    assert dump(read(dump(job))) == dump(job)


SPANS = st.one_of(
    st.floats(0.001, 100).map(lambda percent: f"{percent}%"),
    st.integers(1, 10**9),
    st.integers(1, 10**6).map(lambda count: f"{count}k samples"),
)
POSITIVE = st.floats(1e-12, 1e6)
OPTIMIZERS = st.one_of(
    st.fixed_dictionaries({"name": st.just("sgd"), "lr": POSITIVE}),
    st.fixed_dictionaries({"name": st.just("momentum"), "lr": POSITIVE, "momentum": st.floats(0.1, 0.9)}),
    st.fixed_dictionaries({"name": st.just("adamw"), "lr": POSITIVE, "betas": st.just([0.8, 0.9])}),
)
SCHEDULES = st.one_of(
    st.sampled_from(["constant", "linear", "cosine"]),
    st.fixed_dictionaries({"decay": st.just("cosine"), "warmup": SPANS, "floor": st.floats(0, 1)}),
    st.fixed_dictionaries({"decay": st.just("step"), "every": SPANS}),
    st.fixed_dictionaries({"decay": st.just("warmup-stable-decay"), "last": SPANS}),
)
VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
MODELS = st.one_of(
    st.fixed_dictionaries(
        {"kind": st.just("decoder"), "preset": st.sampled_from(list(PRESETS))},
        optional={"vocabulary": st.none() | st.integers(1, 10**6), "dropout": st.floats(0, 0.9)},
    ),
    st.fixed_dictionaries({"import": st.just("a.b:C"), "args": st.dictionaries(st.text(max_size=5), VALUES)}),
    st.dictionaries(st.text(max_size=5), VALUES).map(lambda config: {"huggingface": {**config, "model_type": "gpt2"}}),
)
TRAINS = st.fixed_dictionaries(
    {"tokens": st.sampled_from(["20M", 5000, "1.001k"]), "batch": st.integers(1, 10**6), "optimizer": OPTIMIZERS},
    optional={
        "schedule": SCHEDULES,
        "clip": st.one_of(st.builds(lambda x: {"norm": x}, POSITIVE), st.builds(lambda x: {"value": x}, POSITIVE)),
        "l2": POSITIVE,
        "precision": st.sampled_from(["bf16", "FP32"]),
        "sample": st.fixed_dictionaries({"prompt": st.text(st.characters(codec="utf-8"), max_size=20)}),
    },
)
LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "deadline": st.floats(0.001, 1e7).map(lambda amount: f"{amount}h"),
        "step": st.integers(1, 10**9).map(lambda amount: f"{amount}s"),
    },
)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1), model=MODELS, train=TRAINS, limits=LIMITS, every=st.sampled_from(["7%", "10m", 99])
)
def test_any_job_reads_back_as_the_same_job(
    seed: int, model: dict[str, Any], train: dict[str, Any], limits: dict[str, Any], every: Any
) -> None:
    changes = {"seed": seed, "model": model, "train": train, "limits": limits, "checkpoint": {"every": every}}
    job = read({**TEXT, **changes})
    assert read(dump(job)) == job
    assert job.seed == seed


def test_an_empty_value_given_on_purpose_is_kept() -> None:
    job = read(merge(TEXT, {"model": {"kind": "decoder", "preset": "gpt2-124m", "vocabulary": None}}))
    assert isinstance(job.model, DecoderModel) and job.model.vocabulary is None
    assert read(dump(job)) == job
    own = read(merge(NUMBERS, {"model": {"import": "a:b", "args": {"x": None, "y": float("inf")}}}))
    assert dump(own)["model"]["args"] == {"x": None, "y": float("inf")}


def test_paths_mean_the_same_wherever_the_job_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v1.0").mkdir()
    monkeypatch.chdir(tmp_path / "v1.0")
    jobs = [read(merge(TEXT, {"data.source": source})) for source in ("words.txt", "./words", ".", "../v1.0/")]
    monkeypatch.chdir(tmp_path)
    here = f"{tmp_path}/v1.0"
    assert [job.data.source for job in jobs[:3]] == [f"{here}/words.txt", f"{here}/words", f"{here}/"]
    assert [read(dump(job)) for job in jobs] == jobs


# --- a job never changes ---------------------------------------------------------------------------------------------


def test_a_job_is_immutable() -> None:
    job = read(TEXT)
    for section, name in [(job, "seed"), (job.model, "layers"), (job.train, "batch"), (job.train.optimizer, "lr")]:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(section, name, 1)
        with pytest.raises(ValidationError, match="frozen"):
            delattr(section, name)
    with pytest.raises(ValidationError, match="frozen"):
        job.nonsense = 1
    with pytest.raises(AttributeError):
        Span(1, "steps").amount = 2  # type: ignore[misc]


# --- presets ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_is_a_whole_model(preset: str) -> None:
    model = read(merge(TEXT, {"model": {"kind": "decoder", "preset": preset}})).model
    assert isinstance(model, DecoderModel)
    assert {name: getattr(model, name) for name in PRESETS[preset]} == PRESETS[preset]
    assert model.preset == preset


def test_a_preset_can_be_overridden() -> None:
    model = {"kind": "decoder", "preset": "llama-1b", "layers": 2, "vocabulary": "32k", "tied": False}
    changed = read(merge(TEXT, {"model": model})).model
    assert isinstance(changed, DecoderModel)
    assert (changed.layers, changed.vocabulary, changed.tied, changed.hidden) == (2, 32_000, False, 2048)


def test_an_override_on_the_command_line_reaches_into_a_preset() -> None:
    values = merge(TEXT, {"model": {"kind": "decoder", "preset": "llama-1b"}})
    job = read_job(yaml.safe_dump(values), overrides=["model.preset=gpt2-124m", "model.layers=3"])
    assert isinstance(job.model, DecoderModel)
    assert (job.model.layers, job.model.hidden, job.model.positions) == (3, 768, "learned")


def test_a_preset_with_other_positions_leaves_no_setting_without_effect() -> None:
    values = merge(TEXT, {"model": {"kind": "decoder", "preset": "llama-1b", "positions": "learned"}})
    assert read(dump(read(values))) == read(values)
    with pytest.raises(JobError, match="rope_theta has no effect"):
        read(merge(values, {"model.rope_theta": 500000}))
