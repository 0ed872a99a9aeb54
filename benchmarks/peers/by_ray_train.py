"""The job of launch.py as Ray's documentation would have it: TorchTrainer with DDP. METRICS WORKERS."""

import json
import sys
from pathlib import Path
from typing import Any

import ray
import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from torch import nn

STEPS, BATCH, SAMPLES = 2, 8, 64


def train(config: dict[str, Any]) -> None:
    torch.manual_seed(0)
    inputs, rank = torch.randn(SAMPLES, 4), ray.train.get_context().get_world_rank()
    targets = inputs.sum(1, keepdim=True)
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    share = BATCH // config["workers"]
    for step in range(STEPS):
        rows = slice(step * BATCH + rank * share, step * BATCH + (rank + 1) * share)
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            with Path(config["metrics"]).open("a") as file:
                file.write(json.dumps({"step": step + 1, "loss": loss.item()}) + "\n")


def main() -> None:
    metrics, workers = sys.argv[1], int(sys.argv[2])
    ray.init(address="auto", log_to_driver=False)
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"metrics": metrics, "workers": workers},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
        run_config=RunConfig(storage_path=str(Path(metrics).parent / "storage"), name="launch"),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
