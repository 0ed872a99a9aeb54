"""Workers that add up one bucket after another, with every codec, among 2 to 8 of them, and what each has seen."""

import multiprocessing as mp
import os
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

CODECS: dict[str, dict[str, Any]] = {
    "fp16": {"feedback": True},
    "bf16": {"feedback": True},
    "int8": {"feedback": True},
    "onebit": {},
    "topk": {"part": 0.1},
    "randomk": {},
    "powersgd": {"rank": 2},
    "int8 at random": {"name": "int8"},
    "fp16 alone": {"name": "fp16"},
}
SHAPES = [(250, 137), (64, 32, 3, 5), (1000, 21)]
STEPS = 3


def sum_among(sizes: list[int], folder: Path) -> dict[tuple[int, str], list[dict[str, Any]]]:
    """What each worker has seen, by their number and the codec."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["slipstream.train.loop"])
    pipes, processes = [], []
    for rank in range(max(sizes)):
        mine, theirs = context.Pipe()
        process = context.Process(target=_work, args=(rank, sizes, folder / "meet", theirs), daemon=True)
        process.start()
        pipes.append(mine)
        processes.append(process)
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    try:
        left = list(pipes)
        while left:
            ready = wait(left, 120)
            assert ready, "workers gave no answer"
            for pipe in ready:
                for key, seen in pipe.recv().items():  # type: ignore[union-attr]
                    found.setdefault(key, []).append(seen)
                left.remove(pipe)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return found


def _work(rank: int, sizes: list[int], meet: Path, pipe: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    import torch
    import torch.distributed as dist

    from slipstream.train.exchange.adding import Lane

    torch.set_num_threads(1)
    seen = {}
    for size in (size for size in sizes if rank < size):
        dist.init_process_group("gloo", init_method=f"file://{meet}-{size}", rank=rank, world_size=size)
        lane = Lane(seed=3)
        for name, setting in CODECS.items():
            seen[size, name] = _sum(rank, lane, dist.group.WORLD, {"name": name, **setting})
        dist.barrier()
        dist.destroy_process_group()
    pipe.send(seen)


def _sum(rank: int, lane: Any, group: Any, codec: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch import nn

    from slipstream.job.exchange import AllReduce as Setting
    from slipstream.train.exchange.adding import Coded, build_adder

    weights = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    adder = build_adder(Setting.model_validate({"codec": codec}), None, lane, group, weights)
    assert isinstance(adder, Coded)
    dist.barrier(group)
    given = sums = 0.0
    before = written()
    for step in range(STEPS):
        lane.position = step
        random = torch.Generator().manual_seed(100 * step + rank)
        # Whole numbers of a few digits: whatever is added to whatever, no sum is rounded, and all can be compared.
        flat = torch.randint(-99, 100, (sum(w.numel() for w in weights),), generator=random).float()
        given = given + flat.double()
        adder.start(flat).wait()
        adder.settle(torch.zeros(()))
        sums = sums + flat.double()
    memory = [kept.tensor.double().flatten() for kept in adder.kept() if kept.slot == "memory"]
    return {
        "last": flat.numpy().tobytes(),
        "given": given.numpy(),  # type: ignore[attr-defined]
        "sums": sums.numpy(),  # type: ignore[attr-defined]
        "memory": torch.cat(memory).numpy() if memory else 0.0,
        "said": adder.sent,
        "written": (written() - before) / STEPS,
        "plain": 2 * (group.size() - 1) / group.size() * flat.nbytes,
    }


def written() -> int:
    """Bytes that this process has written so far, to sockets too."""
    return int(Path("/proc/self/io").read_text().split("wchar: ")[1].split()[0])
