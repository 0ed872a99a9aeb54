"""Hugging Face models: from a local folder, or fresh from a configuration. Never from the network."""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.data.base import Facts
from slipstream.data.checks import nearest, need_extra
from slipstream.job import Job
from slipstream.job.models import HuggingFaceModel

# Attention drops inside fused kernels, where masks cannot belong to samples; so here it never drops.
_ATTENTION_DROPOUT = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
_TOKEN_CLASSES = {"next-token": "AutoModelForCausalLM", "masked-token": "AutoModelForMaskedLM"}


class HuggingFace(nn.Module):
    """A Hugging Face model that takes a tensor and returns logits, as all our models do."""

    def __init__(self, inner: nn.Module, tokens: bool, caches: bool) -> None:
        super().__init__()
        self.inner = inner
        self._input = "input_ids" if tokens else "pixel_values"
        self._options = {"use_cache": False} if caches else {}  # a cache serves generation; in training it only costs

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.inner(**{self._input: inputs}, **self._options).logits
        return logits


def build_huggingface(job: Job, facts: Facts) -> nn.Module:
    section = job.model
    assert isinstance(section, HuggingFaceModel)
    need_extra("transformers", "transformers", "hf", "model.huggingface")
    if not facts.tokens and len(facts.inputs) != 3:
        raise ValueError(
            f"model.huggingface takes tokens or images of (channels, height, width), and the data has samples of "
            f"{facts.inputs}; use mlp for rows of numbers"
        )
    wanted, source = _wanted(job, facts), section.source
    config = _config(source, wanted) if isinstance(source, dict) else _folder_config(_folder(source), wanted)
    _check(config, wanted, facts)
    auto = _auto_class(job.task.kind, config)
    # fp32 whatever the folder says: the job's precision is applied by the loop, and the weights stay fp32.
    if isinstance(source, dict) or not _has_weights(_folder(source)) or torch.get_default_device().type == "meta":
        inner = auto.from_config(config, dtype=torch.float32)
    else:
        new_head = "num_labels" in wanted  # for other classes than it was trained on
        inner = auto.from_pretrained(
            source, config=config, dtype=torch.float32, local_files_only=True, ignore_mismatched_sizes=new_head
        )
    return HuggingFace(inner.train(), facts.tokens, caches=job.task.kind == "next-token")


def _wanted(job: Job, facts: Facts) -> dict[str, Any]:
    """What the data says about the model, in Hugging Face's words."""
    wanted: dict[str, Any] = {}
    if job.task.kind in _TOKEN_CLASSES:
        wanted["vocab_size"] = facts.outputs
    else:
        wanted["num_labels"] = facts.outputs
    if not facts.tokens:
        channels, height, width = facts.inputs
        wanted |= {"num_channels": channels, "image_size": height if height == width else (height, width)}
    return wanted


def _config(settings: dict[str, Any], wanted: dict[str, Any]) -> Any:
    """A configuration as the user wrote it, with what the data says where they wrote nothing."""
    from transformers import CONFIG_MAPPING, AutoConfig

    kind = settings["model_type"]
    if kind not in CONFIG_MAPPING:
        raise ValueError(f"model.huggingface: unknown model_type {kind!r}{nearest(kind, list(CONFIG_MAPPING))}")
    default = CONFIG_MAPPING[kind]()
    for key in settings:
        if not hasattr(default, key):  # transformers would keep it and never look at it
            raise ValueError(f"model.huggingface: {kind} has no setting {key!r}{nearest(key, default.to_dict())}")
    images = settings.get("vision_config", {})
    filled = {key: value for key, value in wanted.items() if hasattr(default, key)}
    if hasattr(default, "vision_config"):  # CLIP and its kin keep the images' part in a section of its own
        filled["vision_config"] = {k: v for k, v in wanted.items() if hasattr(default.vision_config, k)} | images
        settings = {key: value for key, value in settings.items() if key != "vision_config"}
    config = AutoConfig.for_model(**filled | settings)
    for key in _still_attention(config):
        if key in settings or key in images:
            raise ValueError(f"model.huggingface: {key} must be 0: its masks would depend on the number of workers")
    return config


def _folder_config(folder: Path, wanted: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    labels = {key: value for key, value in wanted.items() if key == "num_labels"}
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, **labels)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.huggingface: {folder} has no usable config.json: {error}") from error
    for key in _still_attention(config):
        warnings.warn(f"model.huggingface: {key} of {folder} is taken as 0; it would depend on workers", stacklevel=2)
    return config


def _still_attention(config: Any) -> list[str]:
    """Turn dropout in attention off; say which settings that changed."""
    changed = []
    for part in (config, getattr(config, "vision_config", None)):
        for key in _ATTENTION_DROPOUT:
            if getattr(part, key, 0.0):
                setattr(part, key, 0.0)
                changed.append(key)
    return changed


def _check(config: Any, wanted: dict[str, Any], facts: Facts) -> None:
    vocabulary, longest = getattr(config, "vocab_size", None), getattr(config, "max_position_embeddings", None)
    if "vocab_size" in wanted and vocabulary is not None and vocabulary < facts.outputs:
        raise ValueError(
            f"model.huggingface has vocab_size {vocabulary}, but the data has {facts.outputs} token ids; "
            "give data.tokenizer the tokenizer.json of this model, or set vocab_size"
        )
    if facts.tokens and longest is not None and longest < facts.inputs[0]:
        raise ValueError(
            f"model.huggingface takes at most {longest} tokens (max_position_embeddings), "
            f"but the data has sequences of {facts.inputs[0]}"
        )


def _auto_class(task: str, config: Any) -> Any:
    import transformers

    name = _TOKEN_CLASSES.get(task)
    if name is None:
        images = type(config) in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING
        name = "AutoModelForImageClassification" if images else "AutoModelForSequenceClassification"
    auto = getattr(transformers, name)
    if type(config) not in auto._model_mapping:
        raise ValueError(
            f"model.huggingface: {config.model_type} cannot do {task}; transformers has no such head for it"
        )
    return auto


def _folder(source: str) -> Path:
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise ValueError(
            f"model.huggingface: there is no folder {source}; nothing is downloaded: "
            "give a folder on this machine that holds config.json, and weights to start from"
        )
    return folder


def _has_weights(folder: Path) -> bool:
    return any(file.suffix in (".safetensors", ".bin") for file in folder.iterdir())
