"""torchtitan's Llama 3 (its head is not tied), compiled block by block, its loss, optimiser and clipping; one GPU.

On one GPU it trains in autocast, without FSDP. Its activation checkpointing is off, as recomputation is on all sides.
"""

import sys
from importlib.util import find_spec
from unittest.mock import MagicMock

import torch
from peer import DEVICE, Decoder, autocast, drive
from torch import Tensor

if find_spec("datasets") is None:  # it imports them with everything else; no data set of theirs is read here
    sys.modules |= {"datasets": MagicMock(), "datasets.distributed": MagicMock()}

from torchtitan.components.loss import build_cross_entropy_loss
from torchtitan.components.optimizer import build_optimizers
from torchtitan.config import JobConfig
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra.parallelize import apply_compile
from torchtitan.tools.utils import GarbageCollection


def settings(shape: Decoder) -> JobConfig:
    """Its own configuration, with the recipe of the shape."""
    config = JobConfig()
    config.compile.enable = shape.compile
    config.optimizer.lr = shape.lr
    config.optimizer.beta1, config.optimizer.beta2 = shape.betas
    config.optimizer.eps = shape.eps
    config.optimizer.weight_decay = shape.weight_decay
    return config


def build(shape: Decoder, config: JobConfig) -> Transformer:
    """In the order of its trainer: on no device, compiled, then filled where it computes."""
    middle = int(2 * 4 * shape.hidden / 3)  # what it starts from, before its multiplier
    with torch.device("meta"):
        model = Transformer(
            TransformerModelArgs(
                dim=shape.hidden,
                n_layers=shape.layers,
                n_heads=shape.heads,
                n_kv_heads=shape.kv_heads,
                vocab_size=shape.vocabulary,
                ffn_dim_multiplier=shape.feed_forward / middle,
                multiple_of=64,
                norm_eps=shape.norm_eps,
                rope_theta=shape.rope_theta,
                max_seq_len=shape.sequence,
            )
        )
    found = model.layers["0"].feed_forward.w1.out_features
    assert found == shape.feed_forward, f"a feed-forward part of {found} instead of {shape.feed_forward}"
    if config.compile.enable:
        apply_compile(model, config.compile)
    model.to_empty(device=DEVICE)
    with torch.no_grad():
        model.init_weights()
    return model.train()


def main() -> None:
    shape = Decoder.read()
    config = settings(shape)
    collection = GarbageCollection(config.training.gc_freq)
    model = build(shape, config)
    loss_sum = build_cross_entropy_loss(config)
    optimizers = build_optimizers([model], config.optimizer, parallel_dims=None)
    weights, done = list(model.parameters()), 0

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal done
        done += 1
        collection.run(done)
        optimizers.zero_grad()
        with autocast():
            scores = model(inputs)
            loss: Tensor = loss_sum(scores, targets) / targets.numel()
        del scores
        loss.backward()
        clip_grad_norm_(weights, shape.clip, foreach=True)
        optimizers.step()
        return loss

    drive(shape, step)


if __name__ == "__main__":
    main()
