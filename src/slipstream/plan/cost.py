"""From the time of a step to the end of the run and what it costs: failures, checkpoints, storage, egress."""

from dataclasses import dataclass
from math import inf, sqrt

THIS_MACHINE = "this machine"
"""Stands for a cloud in plans for the machine that we are on."""
FAILURES = 2e-5
"""Of an accelerator that nobody takes away, in an hour: 419 in 54 days on 16,384 (arXiv 2407.21783, §3.3.4)."""
RESTART = 300.0
"""Seconds from a failure until the run steps again, with a new machine."""
SAVING = 10e9
"""Bytes a second at which a worker copies its state aside; writing the copy takes nothing from training."""
MONTH = 730.0
"""Hours."""
STORAGE = {
    "aws": (0.023, 0.09),
    "gcp": (0.02, 0.12),
    "azure": (0.0184, 0.087),
    "oci": (0.0255, 0.0085),
    THIS_MACHINE: (0.0, 0.0),
}
"""Dollars for a GB and month, and for a GB that leaves the cloud: list prices of standard object storage, first tier,
2025."""
OTHER_STORAGE = (0.02, 0.05)
"""The same for clouds whose prices are not in the table: about what the cheaper of those above ask."""


@dataclass(frozen=True)
class Waste:
    """What failures and checkpoints take."""

    part: float
    """Of the time, 0 to 1."""
    interval: float
    """Seconds between checkpoints that make it least."""


def least_waste(failures: float, saving: float, restart: float = RESTART) -> Waste:
    """The best interval between checkpoints (Young 1974, doi 10.1145/361147.361115), and what is lost with it.

    `failures` a second, of all machines together; `saving` and `restart` in seconds.
    """
    if failures <= 0:
        return Waste(0.0, inf)
    interval = max(saving, sqrt(2 * saving / failures))
    return Waste(min(1.0, saving / interval + failures * (interval / 2 + restart)), interval)


@dataclass(frozen=True)
class Bill:
    """Dollars."""

    machines: float
    storage: float
    """Data and checkpoints, for as long as the run lasts."""
    egress: float
    """The trained model, out of the cloud."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.machines + self.storage + self.egress


def bill(cloud: str, hourly: float, seconds: float, stored: float, exported: float) -> Bill:
    """What a run costs. `hourly` is the price of all machines; `stored` and `exported` are bytes."""
    a_month, leaving = STORAGE.get(cloud, OTHER_STORAGE)
    hours = seconds / 3600
    return Bill(hourly * hours, stored / 1e9 * a_month * hours / MONTH, exported / 1e9 * leaving)


def machines_for(accelerator_hours: float, hours: float, each: int) -> int:
    """Machines with so many accelerators each: 1,000 accelerator-hours in one hour on machines of 8 take 125."""
    return -int(-accelerator_hours / hours // each)
