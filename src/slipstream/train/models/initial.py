"""Initial weights, drawn in blocks of rows, each from a seed of its own.

So a worker makes only the rows that it holds, and they are those that one worker alone would make.
"""

import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

_BLOCK = 2**18  # numbers, about: so few that blocks keep all cores busy, so many that a seed costs nothing beside them

_HERE = torch.device("cpu")


def normal_rows(
    seed: int, name: str, shape: Sequence[int], std: float, rows: range, device: torch.device = _HERE
) -> Tensor:
    """Some rows of a matrix of this shape, from a normal distribution. For another device they are drawn here too, so
    that they are the same, and moved block by block: memory for all of them at once would be slow to come by."""
    total, columns = shape
    each = max(1, _BLOCK // columns)
    made = torch.empty(len(rows), columns, device=device)
    own = threading.local()

    def fill(block: int) -> None:
        first, last = block * each, min((block + 1) * each, total)
        if not hasattr(own, "room"):
            own.room = torch.empty(each, columns, pin_memory=device.type == "cuda")
        drawn = own.room[: last - first].normal_(0.0, std, generator=_generator(seed, name, block))
        start, stop = max(first, rows.start), min(last, rows.stop)
        made[start - rows.start : stop - rows.start] = drawn[start - first : stop - first]

    blocks = range(rows.start // each, -(-rows.stop // each)) if rows else range(0)
    if len(blocks) == 1:
        fill(blocks[0])
        return made
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(fill, blocks))
    return made


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.blake2b(f"{seed} {name} {block}".encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest) >> 1)
