"""What was measured of this machine, kept so that later plans use it."""

import json
import re
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from slipstream.plan.accelerators import find_accelerator
from slipstream.plan.grid import Hardware
from slipstream.plan.machine import Machine
from slipstream.plan.rates import Rates
from slipstream.runs.cache import cache_folder
from slipstream.runs.folder import write_text


@dataclass(frozen=True)
class Profile:
    """One machine, measured."""

    machine: str
    """In words; another machine's profile is not used."""
    device: str
    date: str
    torch: str
    cores: int
    memory: int
    """Bytes for each accelerator; on CPUs, for all workers together."""
    peaks: dict[str, float]
    """FLOP/s of large matrix products, by the number of threads; on a GPU by precision."""
    bandwidth: float
    """Bytes a second that a copy moves, read and written."""
    operation: float
    """Seconds of the smallest operation there is."""
    link: float
    """Bytes a second of an all-reduce between two workers."""
    latency: float
    """Seconds of its smallest."""
    products: list[tuple[int, int, int, float]]
    """m, n, k and FLOP/s of the products measured, with all threads."""
    rates: dict[str, float]
    """The planner's constants as they are for our program on this machine."""
    steps: list[tuple[str, float, float]]
    """The training steps that they were fitted to: what, seconds measured, seconds that they give."""

    @property
    def fitted(self) -> Rates:
        """The constants."""
        return Rates(**self.rates)

    def hardware(self, workers: int, precision: str) -> Hardware:
        """What each of so many workers has."""
        if self.device == "cpu":
            threads = max(1, self.cores // workers)
            known = max((int(count) for count in self.peaks if int(count) <= threads), default=1)
            crowded = min(1.0, self.cores / (workers * threads))
            peak, memory = self.peaks[str(known)] * crowded, self.memory / workers
            bandwidth = self.bandwidth * crowded
        else:
            peak, memory, bandwidth = self.peaks[precision], float(self.memory), self.bandwidth
        short = precision in ("fp8", "int8")
        return Hardware(
            peak=peak,
            bits=8 if short else 16,
            peak_16=self.peaks["bf16"] if short else peak,
            memory=memory,
            bandwidth=bandwidth,
            link=self.link,
            network=self.link,
            per_node=workers,
            ahead=float(self.device != "cpu"),
        )


def profile_path(machine: Machine) -> Path:
    """Where a machine's profile is kept."""
    return cache_folder() / "profiles" / f"{_slug(str(machine))}.json"


def save_profile(profile: Profile, machine: Machine) -> Path:
    """Keep it."""
    path = profile_path(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(profile), indent=2) + "\n")
    return path


def load_profile(machine: Machine) -> Profile | None:
    """This machine's profile, if `slipstream probe` was run here, or that of its GPU, if it comes with the package.
    Raises ValueError if it is damaged."""
    path = profile_path(machine)
    if path.exists():
        return _read(path, path.read_text())
    return packaged_profile(machine.gpus[0]) if len(set(machine.gpus)) == 1 else None


def packaged_profile(gpu: str) -> Profile | None:
    """What was measured on one GPU of this name, if it comes with the package."""
    file = files("slipstream.plan") / "tables" / "profiles" / f"{_slug(gpu)}.json"
    return _read(Path(str(file)), file.read_text()) if file.is_file() else None


@cache
def our_rates() -> Rates:
    """The planner's constants for our program on rented GPUs: measured on one H200, as parts of its data sheet. What
    one GPU cannot tell, links and networks, is as in published results."""
    measured, sheet = packaged_profile("NVIDIA H200"), find_accelerator("H200")
    assert measured, "it comes with the package"
    rates, part = measured.fitted, measured.peaks["bf16"] / sheet.peaks["bf16"]
    return replace(
        rates,
        matrix_16=rates.matrix_16 * part,
        matrix_8=rates.matrix_8 * measured.peaks["fp8"] / sheet.peaks["fp8"],
        attention=rates.attention * part,
        bandwidth=rates.bandwidth * measured.bandwidth / sheet.bandwidth,
    )


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _read(path: Path, text: str) -> Profile:
    try:
        values = json.loads(text)
        for name in ("products", "steps"):  # JSON has lists only
            values[name] = [tuple(row) for row in values[name]]
        return Profile(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); `slipstream probe` makes it anew") from error
