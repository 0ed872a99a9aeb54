"""Choosing among what a search has found, and saying why not the others."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from typing import Any, Literal

from slipstream.plan.cost import THIS_MACHINE, machines_for
from slipstream.plan.exchange import Agreement
from slipstream.plan.offers import stale
from slipstream.plan.search import Found, Prospect, Wanted, feasible, pareto

Objective = Literal["cheapest", "fastest", "pareto"]
SURE = 0.25
"""Nine predictions in ten were at most this far off, for programs that the constants were not fitted to."""
SURE_CALIBRATED = 0.20
"""The same after one factor, taken from measured steps."""
_FAMILIAR = ("T4", "L4", "A10G", "L40S", "A100-40GB", "A100-80GB", "H100", "H200", "B200", "MI300X")
"""What people ask about."""


class NoPlan(ValueError):
    """Nothing fits; the message says what would."""


@dataclass(frozen=True)
class Choice:
    """The best plans, and why others are not among them."""

    wanted: Wanted
    objective: Objective
    plans: list[Prospect]
    front: list[Prospect]
    """All that no other beats in both time and cost."""
    why_not: list[str]
    hints: list[str]
    stale: str | None
    """What to say of old prices."""
    sure: float
    """How far off time and cost may be, as a part."""
    evaluated: int


def choose(
    wanted: Wanted, found: Found, objective: Objective | None = None, count: int = 6, sure: float = SURE
) -> Choice:
    """The best `count` plans. Raises NoPlan with the nearest budget and deadline if there are none."""
    objective = objective or _objective(wanted)
    possible = feasible(found.prospects, wanted)
    if not possible:
        raise NoPlan(_nothing(wanted, found))
    front = pareto(possible)
    plans = _ends_and_between(front, count) if objective == "pareto" else _best(possible, objective, count)
    return Choice(
        wanted=wanted,
        objective=objective,
        plans=plans,
        front=front,
        why_not=_why_not(wanted, found, plans, objective, front if objective == "pareto" else []),
        hints=_hints(wanted, plans[0]),
        stale=stale((plan.offer for plan in plans), date.today()),
        sure=sure,
        evaluated=found.evaluated,
    )


def larger_batch(choice: Choice, search: Callable[[Wanted], Found]) -> str | None:
    """A word on a larger batch, if that makes a much cheaper plan possible. The batch is the user's, and stays."""
    if choice.plans[0].seconds < _WORTH_A_THOUGHT:
        return None
    now = choice.front[0].cost
    most = max(_LARGER * choice.front[0].accelerators, choice.plans[0].accelerators)
    larger = replace(choice.wanted, batch=_LARGER * choice.wanted.batch, quota=min(choice.wanted.quota, most))
    possible = feasible(search(larger).prospects, larger)
    cheapest = min((each.cost for each in possible), default=float("inf"))
    if cheapest > _MUCH * now:
        return None
    return (
        f"with a batch of {larger.batch:,} ({_LARGER} × yours) the cheapest plan would cost {money(cheapest)} "
        f"instead of {money(now)}, if the model learns as well with it"
    )


_LARGER, _MUCH, _WORTH_A_THOUGHT = 4, 0.8, 3600.0


def _objective(wanted: Wanted) -> Objective:
    if wanted.deadline is not None:
        return "cheapest"
    return "fastest" if wanted.budget is not None else "pareto"


def _ends_and_between(front: Sequence[Prospect], count: int) -> list[Prospect]:
    places = dict.fromkeys(round(number * (len(front) - 1) / max(1, count - 1)) for number in range(count))
    return [front[place] for place in places]


def _best(possible: Sequence[Prospect], objective: Objective, count: int) -> list[Prospect]:
    best: dict[tuple[str, bool], Prospect] = {}  # one of each accelerator, rented either way
    for prospect in sorted(possible, key=lambda each: _rank(each, objective)):
        best.setdefault((prospect.offer.accelerator.name, prospect.spot), prospect)
    return list(best.values())[:count]


def _nothing(wanted: Wanted, found: Found) -> str:
    if not found.prospects:
        least = min(found.refused, key=lambda refused: refused.short, default=None)
        if least is None:
            return "no offer is left by limits.clouds, limits.regions, limits.spot and the others; widen them"
        return (
            f"the model fits on no machine within the limits; the nearest is {least.reason}; allow more accelerators "
            "(limits.accelerators), larger ones, or other layouts"
        )
    cheapest = min(found.prospects, key=lambda each: each.cost)
    soonest = min(found.prospects, key=lambda each: each.seconds)
    parts = ["no plan is within the limits"]
    if wanted.deadline is not None:
        in_time = [each for each in found.prospects if each.seconds <= wanted.deadline]
        if in_time:
            least_cost = min(each.cost for each in in_time)
            parts.append(f"by that deadline the cheapest costs {money(least_cost)}: raise limits.budget to that")
        else:
            parts.append(f"the soonest ends in {duration(soonest.seconds)}, for {money(soonest.cost)}")
    if wanted.budget is not None:
        within = [each for each in found.prospects if each.cost <= wanted.budget]
        if within:
            parts.append(
                f"for that budget the soonest ends in {duration(min(each.seconds for each in within))}: "
                "raise limits.deadline to that"
            )
        else:
            parts.append(f"the cheapest of all costs {money(cheapest.cost)} and ends in {duration(cheapest.seconds)}")
    return "; ".join(parts)


def _why_not(
    wanted: Wanted, found: Found, plans: Sequence[Prospect], objective: Objective, among: Sequence[Prospect]
) -> list[str]:
    shown = {plan.offer.accelerator.name for plan in (*plans, *among)}
    refused_names = [each.kind.offers[0].accelerator.name for each in found.refused]
    known = sorted({*(each.offer.accelerator.name for each in found.prospects), *refused_names})
    lines = []
    for name in known if len(known) <= len(_FAMILIAR) else _FAMILIAR:
        if name in shown:
            continue
        mine = [each for each in found.prospects if each.offer.accelerator.name == name]
        refused = [each for each in found.refused if each.kind.offers[0].accelerator.name == name]
        if mine:
            lines.append(f"{name}: {_reason(wanted, mine, plans, objective)}")
        elif refused:
            lines.append(min(refused, key=lambda each: each.short).reason)
    return lines


def _reason(wanted: Wanted, mine: Iterable[Prospect], plans: Sequence[Prospect], objective: Objective) -> str:
    mine = list(mine)
    cheapest, soonest = min(mine, key=lambda each: each.cost), min(mine, key=lambda each: each.seconds)
    if wanted.deadline is not None and soonest.seconds > wanted.deadline:
        return f"ends in {duration(soonest.seconds)} at the soonest, after your deadline of {duration(wanted.deadline)}"
    if wanted.budget is not None and cheapest.cost > wanted.budget:
        return f"costs {money(cheapest.cost)} at least, over your budget of {money(wanted.budget)}"
    best = plans[0]
    possible = feasible(mine, wanted)
    if not possible:
        return "what is cheap enough is too slow, and what is quick enough costs too much"
    near = min(possible, key=lambda each: _rank(each, objective))
    what = f"at best {near.machines} × {near.offer.cloud} {near.offer.machine}{' spot' if near.spot else ''}"
    if objective == "fastest":
        times = f"{near.seconds / best.seconds:.1f} × plan A"
        return f"{what}: ends in {duration(near.seconds)} ({times}), for {money(near.cost)}"
    times = f" ({near.cost / best.cost:.1f} × plan A)" if best.cost else ""
    return f"{what}: {money(near.cost)}{times}, ends in {duration(near.seconds)}"


def _rank(each: Prospect, objective: Objective) -> tuple[float, float]:
    return (each.seconds, each.cost) if objective == "fastest" else (each.cost, each.seconds)


def _hints(wanted: Wanted, best: Prospect) -> list[str]:
    hints = [] if best.offer.cloud == THIS_MACHINE else [_rule(best)]
    if wanted.fixed:
        said = ", ".join(name for name, _ in wanted.fixed)
        hints.append(f"only layouts with the {said} that the job sets are planned; leave that out to see others")
    return hints


def _rule(plan: Prospect) -> str:
    """The plain rule of machines and hours."""
    hours = plan.seconds / 3600 * plan.accelerators
    each = plan.offer.count
    machines = machines_for(hours, 1.0, each)
    return (
        f"plan A takes {hours:,.0f} GPU-hours: to have them in one hour would take "
        f"{machines:,} machine{'s' if machines > 1 else ''} of {each} GPU{'s' if each > 1 else ''}"
    )


def as_values(plan: Prospect, sure: float, agreement: Agreement) -> dict[str, Any]:
    """A plan as plain values, for programs and files."""
    offer = plan.offer
    return {
        "offer": {
            "cloud": offer.cloud,
            "machine": offer.machine,
            "region": offer.region,
            "accelerator": offer.accelerator.name,
            "accelerators": offer.count,
            "spot": plan.spot,
            "price_per_hour": plan.offer.spot if plan.spot else plan.offer.price,
            "price_date": offer.date.isoformat(),
        },
        "machines": plan.machines,
        "layout": plan.layout.model_dump(mode="json"),
        "precision": plan.precision,
        "exchange": str(agreement) or "allreduce",
        "predicted": {
            "step_seconds": plan.step,
            "seconds": plan.seconds,
            "cost": plan.cost,
            "bill": {field.name: getattr(plan.bill, field.name) for field in fields(plan.bill)},
            "lost_to_failures": plan.waste.part,
            "sure": sure,
            "utilisation": plan.utilisation,
            "checkpoint_seconds": plan.waste.interval if plan.waste.part else None,
            "memory": {field.name: float(getattr(plan.memory, field.name)) for field in fields(plan.memory)},
            "time": {field.name: float(getattr(plan.times, field.name)) for field in fields(plan.times)},
        },
    }


def money(amount: float) -> str:
    """Dollars, as exact as they are known."""
    return f"${amount:,.0f}" if amount >= 100 else f"${amount:,.2f}"


def duration(seconds: float) -> str:
    """A length of time in its natural unit."""
    for unit, size in (("years", 365.25 * 86400), ("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} s"
