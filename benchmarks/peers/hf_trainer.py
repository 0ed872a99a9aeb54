"""Hugging Face Trainer, with its defaults where they cost nothing that the other sides do not pay."""

import tempfile
from typing import Any

import torch
from recipe import WORKERS, Stopwatch, mean_loss, read_recipe
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class WithLoss(nn.Module):
    """The model as the Trainer wants it: it returns its own loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.last = torch.zeros(())

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.model(input_ids)
        loss = mean_loss(logits, labels)
        self.last = loss.detach()
        return {"loss": loss, "logits": logits}


class Laps(TrainerCallback):
    def __init__(self, watch: Stopwatch, module: WithLoss) -> None:
        self._watch, self._module = watch, module

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._watch.lap(self._module.last)


def main() -> None:
    recipe, watch = read_recipe(), Stopwatch()
    module, optimizer = WithLoss(recipe.model), recipe.optimizer
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch,
            optim="adamw_torch_fused",
            learning_rate=optimizer.lr,
            lr_scheduler_type="constant",
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_epsilon=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            max_grad_norm=recipe.clip,
            use_cpu=True,
            ddp_backend="gloo" if WORKERS > 1 else None,
            ddp_find_unused_parameters=False,  # its default for a plain module costs a walk of the graph each step
            dataloader_pin_memory=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        )

        def collate(pairs: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
            inputs, targets = zip(*pairs, strict=True)
            return {"input_ids": torch.stack(inputs), "labels": torch.stack(targets)}

        trainer = Trainer(
            module, arguments, data_collator=collate, train_dataset=recipe.data, callbacks=[Laps(watch, module)]
        )
        trainer.train()
    watch.write()


if __name__ == "__main__":
    main()
