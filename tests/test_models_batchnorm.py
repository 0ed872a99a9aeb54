"""Batch norm over three unequal workers equals batch norm over the whole batch."""

import copy
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from slipstream.train.models.batchnorm import GlobalBatchNorm, synchronise_batch_norm

SPLITS = {"unequal": [3, 3, 2], "empty": [5, 0, 3]}


def model() -> nn.Module:
    torch.manual_seed(1)
    parts = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.Flatten(2),
        nn.BatchNorm1d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(36, 3),
        nn.BatchNorm1d(3, affine=False),
    )
    for part in parts:
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.affine:
            nn.init.normal_(part.weight)
            nn.init.normal_(part.bias)
    return parts.double()


def batches() -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(8, 2, 5, 5, dtype=torch.float64) * 3 + 5 for _ in range(3)]


def steps(net: nn.Module, shares: list[Tensor]) -> dict[str, Tensor]:
    """Three forward and backward passes, the loss a sum over samples divided by the global count."""
    found: dict[str, Tensor] = {}
    for number, share in enumerate(shares):
        x = share.clone().requires_grad_()
        y = net(x)
        ((y**3).sum() / 8).backward()
        assert x.grad is not None
        found |= {f"output {number}": y.detach(), f"dx {number}": x.grad}
    found |= {f"grad {name}": p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return found | {f"buffer {name}": buffer.clone() for name, buffer in net.named_buffers()}


def work(rank: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=3)
    results = {}
    for name, split in SPLITS.items():
        net = model()
        assert synchronise_batch_norm(net) == 3
        results[name] = steps(net, [batch.split(split)[rank] for batch in batches()])
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def by_rank(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    mp.spawn(work, args=(str(folder),), nprocs=3)
    return [torch.load(folder / f"{rank}.pt") for rank in range(3)]


@pytest.mark.parametrize("split", SPLITS)
def test_three_workers_equal_one(split: str, by_rank: list[dict[str, dict[str, Tensor]]]) -> None:
    whole = steps(model(), batches())
    ranks = [results[split] for results in by_rank]
    for name, expected in whole.items():
        parts = [rank[name] for rank in ranks]
        if name.startswith(("output", "dx")):
            found = torch.cat(parts)
        elif name.startswith("grad"):
            found = torch.stack(parts).sum(0)  # the exchange adds gradients up
        else:
            found = parts[0]
            assert all(torch.equal(part, found) for part in parts), f"{name} differs between ranks"
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12, msg=lambda text, n=name: f"{n}: {text}")


def test_one_worker_is_plain_batch_norm() -> None:
    net = model()
    synchronise_batch_norm(net)
    plain, ours = steps(model(), batches()), steps(net, batches())
    assert all(torch.equal(plain[name], ours[name]) for name in plain)


def test_swapping_keeps_everything() -> None:
    net = model().eval()
    net.append(net[1])  # the same layer at a second place
    before, tensors = copy.deepcopy(net.state_dict()), list(net.parameters())
    assert synchronise_batch_norm(net) == 3
    assert isinstance(net[1], GlobalBatchNorm)
    assert net[1] is net[-1]
    assert not net[1].training
    assert (net[4].momentum, net[7].affine) == (None, False)
    assert list(before) == list(net.state_dict())
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert all(old is new for old, new in zip(tensors, net.parameters(), strict=True))
    assert synchronise_batch_norm(net) == 0
