"""nanoGPT's model and optimiser, compiled, in the loop that its README describes; its `model.py` is on the path."""

from typing import Any

import torch
from peer import DEVICE, Decoder, autocast, drive
from torch import Tensor, nn

try:
    import nanogpt_model as nanogpt
except ImportError:
    from nanoGPT import model as nanogpt


def build(shape: Decoder) -> Any:
    config = nanogpt.GPTConfig(
        block_size=shape.sequence,
        vocab_size=shape.vocabulary,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_embd=shape.hidden,
        dropout=0.0,
        bias=True,
    )
    with torch.device(DEVICE):
        return nanogpt.GPT(config)


def main() -> None:
    shape = Decoder.read()
    plain = build(shape)
    optimizer = plain.configure_optimizers(shape.weight_decay, shape.lr, shape.betas, DEVICE.type)
    model = shape.compiled(plain)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast():
            _, loss = model(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), shape.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    drive(shape, step)


if __name__ == "__main__":
    main()
