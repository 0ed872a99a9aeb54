"""The processes of a job's ranks on one machine: what each is started with."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slipstream.fleet.crew import Process
from slipstream.fleet.scratch import Scratch
from slipstream.job import Job
from slipstream.plan import Plan
from slipstream.runs import RunFolder
from slipstream.runs.cache import bytecode_environment, compiler_environment

KEEP_MEMORY = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**36),
    "MALLOC_TOP_PAD_": str(2**26),
}
"""For glibc: keep what is freed instead of giving it back to the system. Every step frees and takes large tensors
anew, and a page that comes fresh from the system must first be cleared, which in a virtual machine can take longer
than the arithmetic (docs/benchmarks.md)."""

WHOLE_MEMORY = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""For torch on a GPU: memory that was freed in pieces can be used as a whole."""

_NCCL = {"ring": "allreduce:ring", "tree": "allreduce:tree"}
"""NCCL's own algorithms by our names; what it does beside sums of gradients is left to it."""
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True)
class Workers:
    """Makes the processes of ranks; workers come first, servers after them."""

    run: RunFolder
    job: Job
    plan: Plan
    home: str
    """Where the user's own modules are found."""
    scratch: Scratch
    meeting: dict[str, str] = field(default_factory=dict)
    """What the ranks must know to find each other, as variables of the environment."""

    def processes(self, ranks: Sequence[int], restore: Path | None) -> list[Process]:
        """On Linux one process forks into all workers, another into all servers; elsewhere forking is not safe."""
        size = self.plan.layout.workers
        kinds = [[rank for rank in ranks if rank < size], [rank for rank in ranks if rank >= size]]
        together = kinds if sys.platform == "linux" else [[rank] for rank in ranks]
        return [self._process(some, restore) for some in together if some]

    def _process(self, ranks: list[int], restore: Path | None) -> Process:
        named = ",".join(map(str, ranks))
        words = [str(self.run.path), named, str(self.plan.layout.workers), str(self.scratch.path)]
        return Process(
            tuple(ranks),
            [sys.executable, "-P", "-m", "slipstream.fleet.worker", *words, *([str(restore)] if restore else [])],
            self.environment(),
            self.run.logs / f"rank-{ranks[0]}.log",
        )

    def environment(self) -> dict[str, str]:
        """Of each of them. What the user has set himself is his."""
        return {
            "GLOO_SOCKET_IFNAME": LOOPBACK,
            "OMP_NUM_THREADS": str(self.plan.threads),
            "TOKENIZERS_PARALLELISM": "false",
            **compiler_environment(),
            **(KEEP_MEMORY if self.plan.device == "cpu" else WHOLE_MEMORY),
            **self.meeting,
            **os.environ,
            **bytecode_environment(),
            **self._algorithm(),
            "PYTHONPATH": os.pathsep.join(path for path in [self.home, *sys.path] if path),
        }

    def _algorithm(self) -> dict[str, str]:
        name = _NCCL.get(self.job.exchange.algorithm) if self.plan.device == "cuda" else None
        return {"NCCL_ALGO": name} if name else {}
