"""Lightning Trainer with Hugging Face's model, compiled; logger, checkpoints and progress bar are off."""

from typing import Any

import lightning
import torch
from hf_model import build
from peer import ON_GPU, Clock, Decoder, Sequences
from torch import Tensor, nn
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self, shape: Decoder) -> None:
        super().__init__()
        self.shape = shape
        self.model = shape.compiled(build(shape))

    def training_step(self, batch: Tensor, _number: int) -> Tensor:
        inputs = batch[:, :-1]
        loss: Tensor = self.model(input_ids=inputs, labels=inputs).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.shape.adamw(self.parameters())

    def configure_gradient_clipping(self, *_: Any, **__: Any) -> None:
        """By hand: Lightning refuses to clip in mixed precision before a fused optimiser, which is the quicker one."""
        nn.utils.clip_grad_norm_(self.parameters(), self.shape.clip)


class Laps(lightning.Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        self.clock.lap(outputs["loss"])


def main() -> None:
    shape, clock = Decoder.read(), Clock()
    trainer = lightning.Trainer(
        accelerator="gpu" if ON_GPU else "cpu",
        devices=1,
        precision="bf16-mixed",
        max_steps=shape.steps,
        max_epochs=-1,
        callbacks=[Laps(clock)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(Sequences(shape), shape.batch, shuffle=True, drop_last=True, pin_memory=ON_GPU)
    trainer.fit(Module(shape), data)
    clock.write()


if __name__ == "__main__":
    main()
