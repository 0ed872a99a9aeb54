"""Hugging Face models: every task, from a configuration and from a folder, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.data.base import Facts
from slipstream.job import Job
from slipstream.train.models import build_model
from slipstream.train.models.dropout import SampleDropout, own_dropout
from slipstream.train.models.huggingface import HuggingFace

transformers = pytest.importorskip("transformers")

TEXT = Facts(inputs=(12,), outputs=61, tokens=True)
IMAGES = Facts(inputs=(1, 8, 8), outputs=10, tokens=False)
BERT = {
    "model_type": "bert",
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
LLAMA = {
    "model_type": "llama", "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
VIT = {**BERT, "model_type": "vit", "patch_size": 4}
_VISION = {key: value for key, value in VIT.items() if key != "model_type"}
CLIP = {"model_type": "clip", "vision_config": _VISION}
RESNET = {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}


def job(source: str | dict[str, Any], task: str) -> Job:
    tokens = task in ("next-token", "masked-token")
    data = {"source": "python-stdlib", "sequence": 12} if tokens else {"source": "digits"}
    if task == "regression":
        data = {"source": "synthetic"}
    return Job.model_validate(
        {
            "name": "test",
            "model": {"huggingface": source},
            "data": data,
            "train": {"task": task, "steps": 1, "batch": 2, "optimizer": {"name": "adamw", "lr": 1e-3}},
        }
    )


def inner(model: nn.Module) -> Any:
    assert isinstance(model, HuggingFace)
    return model.inner


@pytest.mark.parametrize(
    ("config", "task", "architecture"),
    [
        (BERT, "masked-token", "BertForMaskedLM"),
        (GPT2, "next-token", "GPT2LMHeadModel"),
        (LLAMA, "next-token", "LlamaForCausalLM"),
        (VIT, "classification", "ViTForImageClassification"),
        (CLIP, "classification", "CLIPForImageClassification"),
        (RESNET, "classification", "ResNetForImageClassification"),
        (VIT, "regression", "ViTForImageClassification"),
    ],
)
def test_a_fresh_model_of_each_kind(config: dict[str, Any], task: str, architecture: str) -> None:
    tokens = task.endswith("token")
    facts = TEXT if tokens else IMAGES
    model = build_model(job(config, task), facts)
    assert type(inner(model)).__name__ == architecture
    inputs = torch.randint(0, 61, (3, 12)) if tokens else torch.randn(3, 1, 8, 8)
    logits = model(inputs)
    assert logits.shape == ((3, 12, 61) if tokens else (3, 10))
    assert logits.dtype == torch.float32
    logits.square().sum().backward()
    assert any(parameter.grad is not None for parameter in model.parameters())
    if config is not RESNET:
        assert inner(model).config._attn_implementation == "sdpa"


def test_sequences_are_classified_too() -> None:
    sequences = Facts(inputs=(12,), outputs=4, tokens=True)
    model = build_model(job(BERT, "classification"), sequences)
    assert type(inner(model)).__name__ == "BertForSequenceClassification"
    assert model(torch.randint(0, 61, (3, 12))).shape == (3, 4)


def test_weights_follow_from_the_seed_and_meta_has_none() -> None:
    def weights() -> dict[str, torch.Tensor]:
        torch.manual_seed(5)
        return build_model(job(GPT2, "next-token"), TEXT).state_dict()

    first, second = weights(), weights()
    assert all(torch.equal(first[name], second[name]) for name in first)
    with torch.device("meta"):
        empty = build_model(job(GPT2, "next-token"), TEXT)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert sum(p.numel() for p in empty.parameters()) == sum(p.numel() for p in inner(empty).parameters())


def test_a_folder_with_weights(tmp_path: Path) -> None:
    torch.manual_seed(1)
    made = build_model(job(GPT2, "next-token"), TEXT)
    inner(made).bfloat16().save_pretrained(tmp_path)
    model = build_model(job(str(tmp_path), "next-token"), TEXT)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    tokens = torch.randint(0, 61, (2, 12))
    torch.testing.assert_close(model.eval()(tokens), made.float().eval()(tokens))
    with torch.device("meta"):
        empty = build_model(job(str(tmp_path), "next-token"), TEXT)
    assert all(parameter.is_meta for parameter in empty.parameters())


def test_a_folder_with_a_configuration_alone(tmp_path: Path) -> None:
    transformers.BertConfig(**BERT, vocab_size=61).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"attention_probs_dropout_prob of .* is taken as 0"):
        model = build_model(job(str(tmp_path), "masked-token"), TEXT)
    assert model(torch.randint(0, 61, (2, 12))).shape == (2, 12, 61)


def test_a_pretrained_body_gets_a_head_for_these_classes(tmp_path: Path) -> None:
    inner(build_model(job(VIT, "classification"), IMAGES)).save_pretrained(tmp_path)
    model = build_model(job(str(tmp_path), "classification"), Facts(inputs=(1, 8, 8), outputs=7, tokens=False))
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 7)


def test_dropout_of_bert_belongs_to_samples() -> None:
    model = build_model(job({**BERT, "hidden_dropout_prob": 0.5}, "masked-token"), TEXT).double()
    keys = own_dropout(model, seed=3)
    assert sum(isinstance(part, SampleDropout) for part in model.modules()) == 1 + 2 * 2, "none inside attention"
    tokens, positions = torch.randint(0, 61, (8, 12)), torch.arange(40, 48)

    def run(inputs: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        with keys.of(at):
            return model(inputs)

    whole = run(tokens, positions)
    parts = [run(*part) for part in zip(tokens.split([3, 3, 2]), positions.split([3, 3, 2]), strict=True)]
    torch.testing.assert_close(whole, torch.cat(parts), atol=1e-12, rtol=0)
    assert not torch.allclose(whole, run(tokens, positions + 8))


@pytest.mark.parametrize(
    ("source", "task", "facts", "message"),
    [
        ("no/such/folder", "next-token", TEXT, "there is no folder .*no/such/folder; nothing is downloaded"),
        ({"model_type": "brt"}, "next-token", TEXT, r"unknown model_type 'brt' \(did you mean '\w+'"),
        (
            {**BERT, "hiden_size": 8},
            "masked-token",
            TEXT,
            r"bert has no setting 'hiden_size' \(did you mean 'hidden_size'",
        ),
        ({**GPT2, "attn_pdrop": 0.1}, "next-token", TEXT, "attn_pdrop must be 0"),
        (
            {"model_type": "clip", "vision_config": {**_VISION, "attention_dropout": 0.1}},
            "classification",
            IMAGES,
            "attention_dropout must be 0",
        ),
        ({**GPT2, "vocab_size": 60}, "next-token", TEXT, "vocab_size 60, but the data has 61 token ids"),
        ({**GPT2, "n_positions": 8}, "next-token", TEXT, "at most 8 tokens"),
        (LLAMA, "masked-token", TEXT, "llama cannot do masked-token"),
        (VIT, "regression", Facts(inputs=(16,), outputs=1, tokens=False), "takes tokens or images"),
    ],
)
def test_what_cannot_work_is_refused(source: Any, task: str, facts: Facts, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(job(source, task), facts)


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)  # noqa: ARG005
    with pytest.raises(ValueError, match=r'needs transformers: pip install "slipstream\[hf\]"'):
        build_model(job(GPT2, "next-token"), TEXT)
