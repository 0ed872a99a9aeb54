"""A plain PyTorch script with DistributedDataParallel, as one writes it for torchrun: nothing in it knows Slipstream.

slipstream submit torch_ddp.py --on local --workers 2 -- --epochs 3
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
epochs = parser.parse_args().epochs

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
torch.manual_seed(0)

images, labels = load_digits(return_X_y=True)
data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=32, sampler=sampler)

model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    total = torch.zeros(1, device=device)
    for inputs, targets in loader:
        loss = nn.functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    if rank == 0:
        print(f"epoch {epoch}: loss {total.item() / len(loader) / dist.get_world_size():.4f}", flush=True)
dist.destroy_process_group()
