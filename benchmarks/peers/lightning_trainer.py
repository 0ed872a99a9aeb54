"""Lightning Trainer; logger, checkpoints and progress bar are off."""

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from recipe import WORKERS, Recipe, Stopwatch, mean_loss, read_recipe
from torch import Tensor
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.model, self._recipe = recipe.model, recipe

    def training_step(self, batch: tuple[Tensor, Tensor], _number: int) -> Tensor:
        inputs, targets = batch
        return mean_loss(self.model(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._recipe.adamw()


class Laps(lightning.Callback):
    def __init__(self, watch: Stopwatch) -> None:
        self._watch = watch

    def on_train_batch_end(self, _trainer: Any, _module: Any, outputs: Any, *_: Any) -> None:
        self._watch.lap(outputs["loss"])


def main() -> None:
    recipe, watch = read_recipe(), Stopwatch()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=WORKERS,
        strategy=DDPStrategy(process_group_backend="gloo") if WORKERS > 1 else "auto",
        precision="32-true",
        max_steps=recipe.steps,
        max_epochs=-1,
        gradient_clip_val=recipe.clip,
        callbacks=[Laps(watch)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(recipe), DataLoader(recipe.data, recipe.batch, shuffle=True, drop_last=True))
    watch.write()


if __name__ == "__main__":
    main()
