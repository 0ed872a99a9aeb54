"""Our decoder's weights under Hugging Face's names, for the two families it knows."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from slipstream.job.models import DecoderModel
from slipstream.train.models.decoder import Decoder

Named = Iterator[tuple[str, Tensor]]


def family(section: DecoderModel) -> str | None:
    """`gpt2` or `llama`, or None for a mixture that Hugging Face has no name for."""
    style = (section.positions, section.norm, section.activation, section.bias)
    if style == ("learned", "layer", "gelu", True) and section.kv_heads in (None, section.heads):
        return "gpt2"
    return "llama" if style == ("rotary", "rms", "swiglu", False) else None


def layout(model: Decoder) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """config.json and weights as `transformers` reads them."""
    named = family(model.section)
    if named is None:
        return None
    config, weights = (_gpt2_config, _gpt2_weights) if named == "gpt2" else (_llama_config, _llama_weights)
    state = {
        name: _order_heads(tensor, model) if ".qkv." in name else tensor for name, tensor in model.state_dict().items()
    }
    # What is not known stays null: left out, transformers would fill in the ids of another tokeniser.
    shared = {"tie_word_embeddings": model.section.tied, "bos_token_id": None, "eos_token_id": None}
    return {**config(model), **shared}, dict(weights(state, model.section))


def _order_heads(projection: Tensor, model: Decoder) -> Tensor:
    """Ours has groups of heads, each its queries, key and value; theirs all queries, then all keys, then all values."""
    section = model.section
    kv_heads, size = section.kv_heads or section.heads, section.hidden // section.heads
    groups = projection.view(kv_heads, section.heads // kv_heads + 2, size, -1)
    parts = torch.split(groups, (section.heads // kv_heads, 1, 1), dim=1)  # type: ignore[arg-type]
    return torch.cat([part.reshape(-1, *projection.shape[1:]) for part in parts])


def _gpt2_config(model: Decoder) -> dict[str, Any]:
    section = model.section
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": model.vocabulary,
        "n_positions": model.context,
        "n_embd": section.hidden,
        "n_layer": section.layers,
        "n_head": section.heads,
        "n_inner": section.inner,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": section.norm_eps,
        "embd_pdrop": section.dropout,
        "resid_pdrop": section.dropout,
        "attn_pdrop": 0.0,
    }


def _gpt2_weights(state: dict[str, Tensor], section: DecoderModel) -> Named:
    yield "transformer.wte.weight", state["embed.tokens.weight"]
    yield "transformer.wpe.weight", state["embed.positions.weight"]
    for layer in range(section.layers):
        ours, theirs = f"blocks.{layer}", f"transformer.h.{layer}"
        for norm, name in (("attention_norm", "ln_1"), ("feed_forward_norm", "ln_2")):
            yield f"{theirs}.{name}.weight", state[f"{ours}.{norm}.weight"]
            yield f"{theirs}.{name}.bias", state[f"{ours}.{norm}.bias"]
        for linear, name in (
            ("attention.qkv", "attn.c_attn"),
            ("attention.out", "attn.c_proj"),
            ("feed_forward.up", "mlp.c_fc"),
            ("feed_forward.down", "mlp.c_proj"),
        ):
            yield f"{theirs}.{name}.weight", state[f"{ours}.{linear}.weight"].t()  # theirs are [in, out]
            yield f"{theirs}.{name}.bias", state[f"{ours}.{linear}.bias"]
    yield "transformer.ln_f.weight", state["norm.weight"]
    yield "transformer.ln_f.bias", state["norm.bias"]
    if not section.tied:
        yield "lm_head.weight", state["head.weight"]


def _llama_config(model: Decoder) -> dict[str, Any]:
    section = model.section
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocabulary,
        "max_position_embeddings": model.context,
        "hidden_size": section.hidden,
        "intermediate_size": section.inner,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.kv_heads or section.heads,
        "head_dim": section.hidden // section.heads,
        "hidden_act": "silu",
        "rms_norm_eps": section.norm_eps,
        "rope_theta": section.rope_theta,  # read by transformers 4; 5 reads the next line
        "rope_parameters": {"rope_type": "default", "rope_theta": section.rope_theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
    }


def _llama_weights(state: dict[str, Tensor], section: DecoderModel) -> Named:
    size, kv_heads = section.hidden // section.heads, section.kv_heads or section.heads
    parts = [section.heads * size, kv_heads * size, kv_heads * size]
    yield "model.embed_tokens.weight", state["embed.tokens.weight"]
    for layer in range(section.layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        for name, weight in zip("qkv", torch.split(state[f"{ours}.attention.qkv.weight"], parts), strict=True):
            yield f"{theirs}.self_attn.{name}_proj.weight", weight
        for part, name in (
            ("attention_norm", "input_layernorm"),
            ("attention.out", "self_attn.o_proj"),
            ("feed_forward_norm", "post_attention_layernorm"),
            ("feed_forward.gate", "mlp.gate_proj"),
            ("feed_forward.up", "mlp.up_proj"),
            ("feed_forward.down", "mlp.down_proj"),
        ):
            yield f"{theirs}.{name}.weight", state[f"{ours}.{part}.weight"]
    yield "model.norm.weight", state["norm.weight"]
    if not section.tied:
        yield "lm_head.weight", state["head.weight"]
