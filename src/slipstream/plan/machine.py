"""What this machine is: cores, memory, GPUs. Cheap to ask: torch is loaded only where nobody else can tell."""

import os
import platform
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

from slipstream.plan.driver import Gpu, ask_driver


@dataclass(frozen=True)
class Machine:
    """One machine that can run workers."""

    processor: str
    """Its name, where that is known."""
    cores: int
    memory: int
    """Bytes."""
    gpus: tuple[str, ...]
    """Names, in the order of their numbers."""
    bf16: bool
    """Whether the GPUs multiply bf16 in hardware."""
    fp8: bool = False
    """The same of fp8."""

    def room(self, device: str) -> int:
        """How many workers it has room for: one for each GPU, or for each core on `cpu` and where there is no GPU."""
        return len(self.gpus) if self.gpus and device != "cpu" else self.cores

    def __str__(self) -> str:
        cores = f"{self.cores} cores of {self.processor}" if self.processor else f"{self.cores} cores"
        what = f"{len(self.gpus)} × {self.gpus[0]}" if self.gpus else cores
        return f"{what}, {self.memory / 1e9:.0f} GB"


ANY_MACHINE = Machine("any machine", cores=1, memory=0, gpus=(), bf16=True)
"""Stands for all in a plan that is only looked at."""


@cache
def this_machine() -> Machine:
    """Ask the operating system, and torch if there is a GPU."""
    gpus, bf16, fp8 = _gpus()
    return Machine(_processor(), _cores(), _memory(), gpus, bf16, fp8)


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # what this process may use, which in a container is less than there is
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 0


def _gpus() -> tuple[tuple[str, ...], bool, bool]:
    if not Path("/dev/nvidiactl").exists() or version("torch").endswith("+cpu"):
        return (), False, False
    # Which ones, and in what order, are torch's to say where somebody has chosen among them or they differ.
    gpus = None if "CUDA_VISIBLE_DEVICES" in os.environ else ask_driver()
    if gpus is None or len(set(gpus)) > 1:
        gpus = _ask_torch()
    least = min((capability for _, capability in gpus), default=(0, 0))
    return tuple(name for name, _ in gpus), least >= (8, 0), least >= (8, 9)


def _ask_torch() -> list[Gpu]:
    import torch

    gpus = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    return [(torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index)) for index in gpus]
