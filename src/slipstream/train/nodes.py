"""Which machine each worker is on. A launcher knows it without torch."""

import os
import socket

NODES = "SLIPSTREAM_NODES"
"""The environment variable by which a fleet names each rank's machine: `a,a,b,b`. Otherwise it is the host name."""


def nodes_of(size: int) -> tuple[int, ...]:
    """The machine of every worker, as a number. Where no fleet has named them, all workers must ask together."""
    told = os.environ.get(NODES)
    names: list[str] = told.split(",") if told else [""] * size
    if len(names) != size:
        raise ValueError(
            f"the environment's {NODES} names the machines of {len(names)} workers, and there are {size}: unset it, or "
            "name as many"
        )
    if not told:
        import torch.distributed as dist

        dist.all_gather_object(names, socket.gethostname())
    known = list(dict.fromkeys(names))
    return tuple(known.index(name) for name in names)
