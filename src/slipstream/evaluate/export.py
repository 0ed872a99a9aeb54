"""The trained model as files that others can read."""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from slipstream.data.base import Facts
from slipstream.data.tokenizer import ids_of
from slipstream.evaluate.huggingface_layout import layout
from slipstream.job import Job
from slipstream.train.models.decoder import Decoder
from slipstream.train.models.huggingface import HuggingFace


def export(model: nn.Module, job: Job, facts: Facts, folder: Path, tokenizer: bytes | None) -> Path:
    """Write model.safetensors, config.json and the tokeniser; the folder appears whole or not at all.

    In Hugging Face's layout where there is one, for `from_pretrained`; otherwise under our own names.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    shutil.rmtree(fresh, ignore_errors=True)  # left by a process that died
    fresh.mkdir()
    try:
        _write(model, job, facts, fresh, tokenizer)
        _replace(folder, fresh)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def _write(model: nn.Module, job: Job, facts: Facts, folder: Path, tokenizer: bytes | None) -> None:
    dtype = torch.float64 if job.train.precision == "fp64" else torch.float32
    end = _write_tokenizer(tokenizer, folder) if tokenizer else None
    if isinstance(model, HuggingFace):
        model.inner.save_pretrained(folder)  # type: ignore[operator]
        return
    config: dict[str, Any] = {"model": _section(job), "facts": asdict(facts)}
    weights = model.state_dict()
    if isinstance(model, Decoder) and (known := layout(model)):
        config, weights = known
        name = str(dtype).removeprefix("torch.")
        config |= {"dtype": name, "torch_dtype": name}  # transformers 5 and 4
        if end is not None:
            config |= {"bos_token_id": end, "eos_token_id": end}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(_plain(weights, dtype), folder / "model.safetensors", metadata={"format": "pt"})


def _section(job: Job) -> dict[str, Any]:
    return job.model.model_dump(mode="json", by_alias=True)


def _plain(weights: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors in main memory, each once: of names tied to the same tensor the first stays, as safetensors expects."""
    plain: dict[str, Tensor] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, tensor in weights.items():
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place in seen and tensor.numel():
            continue
        seen.add(place)
        tensor = tensor.detach().to("cpu", dtype if tensor.is_floating_point() else tensor.dtype)
        plain[name] = tensor.contiguous()
    return plain


def _write_tokenizer(source: bytes, folder: Path) -> int | None:
    """Write tokenizer.json, with the few words `AutoTokenizer` needs beside it; return the id that ends a text."""
    (folder / "tokenizer.json").write_bytes(source)
    tokenizer = Tokenizer.from_buffer(source)
    end = ids_of(tokenizer).end_of_text
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    if end is not None and (token := tokenizer.id_to_token(end)):
        config["eos_token"] = token
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return end


def _replace(folder: Path, fresh: Path) -> None:
    if not folder.exists():
        fresh.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old)
