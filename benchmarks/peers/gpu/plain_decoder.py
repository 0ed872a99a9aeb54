"""Slipstream's own decoder in a plain loop that is not compiled: what there is without any trainer."""

from pathlib import Path

import torch.nn.functional as F
from peer import DEVICE, Decoder, autocast, drive
from torch import Tensor, nn

from slipstream.data.base import Facts
from slipstream.job import load_job
from slipstream.train.models import build_model


def main() -> None:
    shape = Decoder.read()
    model = build_model(load_job(Path(shape.job)), Facts((shape.sequence,), shape.vocabulary, tokens=True)).to(DEVICE)
    optimizer = shape.adamw(model.parameters())

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        with autocast():
            loss = F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), shape.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    drive(shape, step)


if __name__ == "__main__":
    main()
