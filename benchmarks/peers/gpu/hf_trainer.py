"""Hugging Face Trainer: compiled, or with `liger` with Liger's kernels instead.

Its defaults, but for what would only slow it here: it need not look at every loss for NaN, which waits for the device.
"""

import sys
import tempfile
from typing import Any

import torch
from hf_model import build
from peer import ON_GPU, Clock, Decoder, Sequences
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments


class Timed(Trainer):
    """Keeps the last loss at hand, as a tensor."""

    last: Tensor

    def training_step(self, *inputs: Any, **more: Any) -> Tensor:
        self.last = super().training_step(*inputs, **more)
        return self.last


class Laps(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.trainer: Timed | None = None

    def on_step_end(self, *_: Any, **__: Any) -> None:
        assert self.trainer, "set before it trains"
        self.clock.lap(self.trainer.last)


def collate(rows: list[Tensor]) -> dict[str, Tensor]:
    """The model shifts the labels itself, so that the last token of a sequence has none."""
    inputs = torch.stack(rows)[:, :-1].contiguous()
    return {"input_ids": inputs, "labels": inputs}


def main() -> None:
    shape, clock = Decoder.read(), Clock()
    liger = "liger" in sys.argv[3:]
    laps = Laps(clock)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=shape.steps,
            per_device_train_batch_size=shape.batch,
            bf16=True,
            torch_compile=shape.compile and not liger,
            use_liger_kernel=liger,
            optim="adamw_torch_fused",
            learning_rate=shape.lr,
            lr_scheduler_type="constant",
            adam_beta1=shape.betas[0],
            adam_beta2=shape.betas[1],
            adam_epsilon=shape.eps,
            weight_decay=shape.weight_decay,
            max_grad_norm=shape.clip,
            logging_nan_inf_filter=False,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=not ON_GPU,
            dataloader_pin_memory=ON_GPU,
        )
        laps.trainer = Timed(
            build(shape), arguments, data_collator=collate, train_dataset=Sequences(shape), callbacks=[laps]
        )
        laps.trainer.train()
    clock.write()


if __name__ == "__main__":
    main()
