"""What is exported: the same logits in Hugging Face's hands, plain files for the rest, whole or not at all."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn

from slipstream.data.base import Facts
from slipstream.evaluate.export import export
from slipstream.evaluate.generate import generate
from slipstream.job import Job
from slipstream.train.models import build_model

TEXT = Facts(inputs=(16,), outputs=300, tokens=True)
IMAGES = Facts(inputs=(1, 8, 8), outputs=10, tokens=False)
GPT2 = {"positions": "learned", "norm": "layer", "activation": "gelu", "bias": True, "dropout": 0.1}


def job(model: dict[str, Any], precision: str = "fp32", source: str = "python-stdlib") -> Job:
    return Job.model_validate(
        {
            "name": "test",
            "model": model,
            "data": {"source": source},
            "train": {"steps": 1, "batch": 2, "precision": precision, "optimizer": {"name": "adamw", "lr": 1e-3}},
        }
    )


def decoder(**settings: Any) -> dict[str, Any]:
    return {"kind": "decoder", "layers": 2, "hidden": 32, "heads": 4, "context": 256, **settings}


def built(of: Job, facts: Facts = TEXT) -> nn.Module:
    """With weights as large as training makes them: at 0.02 a wrong mapping hardly shows."""
    torch.manual_seed(0)
    model = build_model(of, facts)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double() if of.train.precision == "fp64" else model


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["def train(model, data): return model(data)\n"] * 20, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    made.save(str(path))
    return path


@pytest.mark.parametrize(
    ("settings", "precision", "tolerance"),
    [
        ({**GPT2}, "fp64", 1e-9),
        ({**GPT2, "tied": False, "feed_forward": 80}, "fp64", 1e-9),
        ({}, "fp32", 1e-5),
        ({"tied": False, "kv_heads": 2, "rope_theta": 500000.0, "norm_eps": 1e-6}, "fp32", 1e-5),
    ],
    ids=["gpt2-tied", "gpt2-untied", "llama-tied", "llama-untied-grouped"],
)
def test_the_same_logits_in_transformers(
    settings: dict[str, Any], precision: str, tolerance: float, tmp_path: Path, tokenizer: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    wanted = job(decoder(**settings), precision)
    model = built(wanted).eval()
    folder = export(model, wanted, TEXT, tmp_path / "model", tokenizer.read_bytes())
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert theirs.dtype == (torch.float64 if precision == "fp64" else torch.float32)
    tokens = torch.randint(0, 300, (2, 200))
    with torch.no_grad():
        ours, found = model(tokens), theirs(tokens).logits
    assert float((ours - found).abs().max() / ours.abs().max()) < tolerance
    assert theirs.config.eos_token_id == 0
    text = "def model(data): return ☂"
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    assert loaded(text)["input_ids"] == Tokenizer.from_file(str(tokenizer)).encode(text).ids
    assert loaded.eos_token == "<|endoftext|>"


def test_without_a_tokenizer_no_ids_are_invented(tmp_path: Path) -> None:
    for settings in (GPT2, {}):
        wanted = job(decoder(**settings))
        folder = export(built(wanted), wanted, TEXT, tmp_path / "model", None)
        config = json.loads((folder / "config.json").read_text())
        assert config["eos_token_id"] is None
        assert not (folder / "tokenizer.json").exists()


def test_a_mixture_is_written_under_our_names(tmp_path: Path) -> None:
    wanted = job(decoder(activation="gelu"))
    model = built(wanted)
    folder = export(model, wanted, TEXT, tmp_path / "model", None)
    config = json.loads((folder / "config.json").read_text())
    assert config["model"]["activation"] == "gelu"
    assert config["facts"] == {"inputs": [16], "outputs": 300, "tokens": True, "white": 1}
    state = load_file(folder / "model.safetensors")
    assert all(torch.equal(state[name], value) for name, value in model.named_parameters())


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_other_models_keep_their_names_and_precision(precision: str, tmp_path: Path) -> None:
    wanted = job({"kind": "resnet", "width": 4, "stem": "small"}, precision, "digits")
    model = built(wanted, IMAGES)
    folder = export(model.bfloat16() if precision == "fp32" else model, wanted, IMAGES, tmp_path / "model", None)
    state = load_file(folder / "model.safetensors")
    assert set(state) == set(model.state_dict())
    floats = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    assert floats == {torch.float64 if precision == "fp64" else torch.float32}
    assert state["stem.1.num_batches_tracked"].dtype == torch.int64


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight


def test_tied_tensors_are_written_once(tmp_path: Path) -> None:
    model, wanted = Tied(), job({"import": "users:Tied"}, source="synthetic")
    folder = export(model, wanted, Facts(inputs=(4,), outputs=4, tokens=False), tmp_path / "model", None)
    assert list(load_file(folder / "model.safetensors")) == ["first.weight"]
    assert json.loads((folder / "config.json").read_text())["model"]["import"] == "users:Tied"
    other = Tied()
    load_model(other, folder / "model.safetensors")
    assert torch.equal(other.second.weight, model.second.weight)


def test_a_hugging_face_model_goes_back_as_it_came(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32}
    wanted = job({"huggingface": config})
    model = built(wanted)
    folder = export(model, wanted, TEXT, tmp_path / "model", None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.config.use_cache
    tokens = torch.randint(0, 300, (2, 16))
    torch.testing.assert_close(theirs(tokens).logits, model.eval()(tokens))


def test_the_folder_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = job({"kind": "linear"}, source="digits")
    model = built(wanted, IMAGES)
    folder = export(model, wanted, IMAGES, tmp_path / "new" / "model", None)
    (folder / "left-over").touch()
    first = (folder / "model.safetensors").read_bytes()

    def fail(*_: object, **__: object) -> None:
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("slipstream.evaluate.export.save_file", fail)
        with pytest.raises(OSError, match="no space"):
            export(model, wanted, IMAGES, folder, None)
    assert (folder / "model.safetensors").read_bytes() == first
    export(model, wanted, IMAGES, folder, None)
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors"}
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_generation_follows_from_the_seed(tokenizer: Path) -> None:
    model = built(job(decoder())).train()

    def text(prompt: str = "def ", temperature: float = 0.8, seed: int = 1) -> str:
        return generate(model, tokenizer.read_bytes(), prompt, 24, temperature, seed, 16, "cpu")

    assert text().startswith("def ")
    assert text() == text()
    assert text(seed=1) != text(seed=2)
    assert text(temperature=0, seed=1) == text(temperature=0, seed=2)
    assert text(prompt="") == text(prompt="")
    assert model.training
