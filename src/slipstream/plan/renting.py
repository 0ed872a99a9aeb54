"""What a saved plan wants to rent: the offer it names, the machine that this is, and what it costs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.job.base import nearest
from slipstream.plan.choose import duration, money
from slipstream.plan.machine import Machine
from slipstream.plan.offers import Offer, load_offers


@dataclass(frozen=True)
class Rent:
    """Some machines of one offer."""

    offer: Offer
    machines: int
    spot: bool
    """Whether they may be taken away, for less."""
    price: float
    """Dollars an hour, of all of them."""
    total: float | None = None
    """Dollars for the whole run, as the plan expects; None where the plan is for another number of machines."""
    seconds: float | None = None
    """How long that run takes."""
    sure: float = 0.0
    """How far off both may be, as a part."""

    @property
    def machine(self) -> Machine:
        """One of them."""
        offer = self.offer
        peaks, gpus = offer.accelerator.peaks, (offer.accelerator.name,) * offer.count
        return Machine(offer.cloud, offer.cores, offer.memory, gpus, "bf16" in peaks, "fp8" in peaks)

    def __str__(self) -> str:
        offer, way = self.offer, "spot" if self.spot else "on demand"
        what = f"{self.machines} × {offer.cloud} {offer.machine} {way} in {offer.region}: {money(self.price)} an hour"
        if self.total is None or self.seconds is None:
            return f"{what}; the total is not known, because the plan is for another number of machines"
        return f"{what}, about {money(self.total)} in all, in {duration(self.seconds)} (±{self.sure:.0%})"


def read_rent(plan: Mapping[str, Any], machines: int) -> Rent:
    """What a saved plan says, for this number of machines. Raises ValueError if it names nothing that can be rented."""
    named = plan.get("offer") or {}
    offer = find_offer(**{key: str(named.get(key, "")) for key in ("cloud", "machine", "region", "accelerator")})
    spot = bool(named.get("spot"))
    each = named.get("price_per_hour") or (offer.spot if spot else offer.price)
    if each is None:
        raise ValueError(f"{offer.cloud} {offer.machine} has no spot price in {offer.region}; plan again")
    rent = Rent(offer, machines, spot, float(each) * machines)
    predicted = plan.get("predicted") or {}
    if plan.get("machines") != machines or not {"cost", "seconds"} <= set(predicted):
        return rent
    return Rent(
        offer, machines, spot, rent.price, float(predicted["cost"]), float(predicted["seconds"]),
        float(predicted.get("sure", 0.0)),
    )  # fmt: skip


def find_offer(cloud: str, machine: str, region: str, accelerator: str) -> Offer:
    """The offer of these names. Raises ValueError with the nearest name of what is not there."""
    found = list(load_offers())
    parts: dict[str, tuple[str, Callable[[Offer], str]]] = {
        "cloud": (cloud, lambda offer: offer.cloud),
        "machine": (machine, lambda offer: offer.machine),
        "region": (region, lambda offer: offer.region),
        "accelerator": (accelerator, lambda offer: offer.accelerator.name),
    }
    for what, (name, of) in parts.items():
        names = sorted({of(offer) for offer in found})
        found = [offer for offer in found if of(offer) == name]
        if not found:
            raise ValueError(
                f"offer.{what}: {name!r} is not in the table of offers{nearest(name, names)}; `slipstream offers` "
                "lists what can be rented"
            )
    return found[0]
