"""What this machine is: cores, memory, GPUs. Cheap to ask: torch is loaded only where there is a GPU to ask about."""

import os
import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Machine:
    """One machine that can run workers."""

    processor: str
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
        what = f"{len(self.gpus)} × {self.gpus[0]}" if self.gpus else f"{self.cores} cores of {self.processor}"
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
    if not Path("/dev/nvidiactl").exists():
        return (), False, False
    import torch

    if not torch.cuda.is_available():
        return (), False, False
    names = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
    fp8 = torch.cuda.get_device_capability() >= (8, 9)
    return names, torch.cuda.is_bf16_supported(including_emulation=False), fp8
