"""Hugging Face's decoder of a shape, made on the device."""

import torch
from peer import DEVICE, Decoder
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel


def build(shape: Decoder) -> PreTrainedModel:
    """Without a cache of keys and values, which only generating needs."""
    with torch.device(DEVICE):
        model = GPT2LMHeadModel(_gpt2(shape)) if shape.family == "gpt2" else LlamaForCausalLM(_llama(shape))
    model.loss_type = "ForCausalLM"  # GPT-2 takes it anyway, after a warning that keeps the compiler from head and loss
    return model


def _llama(shape: Decoder) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.sequence,
        hidden_size=shape.hidden,
        intermediate_size=shape.feed_forward,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        tie_word_embeddings=shape.tied,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )


def _gpt2(shape: Decoder) -> GPT2Config:
    return GPT2Config(
        vocab_size=shape.vocabulary,
        n_positions=shape.sequence,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.feed_forward,
        layer_norm_epsilon=shape.norm_eps,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
