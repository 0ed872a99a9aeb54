"""What was measured of this machine, kept so that later plans use it."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

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
        return Hardware(
            peak=peak,
            bits=16,
            peak_16=peak,
            memory=memory,
            bandwidth=bandwidth,
            link=self.link,
            network=self.link,
            per_node=workers,
            ahead=float(self.device != "cpu"),
        )


def profile_path(machine: Machine) -> Path:
    """Where a machine's profile is kept."""
    name = re.sub(r"[^a-z0-9]+", "-", str(machine).lower()).strip("-")
    return cache_folder() / "profiles" / f"{name}.json"


def save_profile(profile: Profile, machine: Machine) -> Path:
    """Keep it."""
    path = profile_path(machine)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(asdict(profile), indent=2) + "\n")
    return path


def load_profile(machine: Machine) -> Profile | None:
    """This machine's profile, if `slipstream probe` was run here. Raises ValueError if it is damaged."""
    path = profile_path(machine)
    if not path.exists():
        return None
    try:
        values = json.loads(path.read_text())
        for name in ("products", "steps"):  # JSON has lists only
            values[name] = [tuple(row) for row in values[name]]
        return Profile(**values)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged ({error}); `slipstream probe` makes it anew") from error
