"""The machines of a fleet as if they were rented, so that layouts for them are found by the same search."""

import datetime

from slipstream.plan.accelerators import find_accelerator
from slipstream.plan.machine import Machine
from slipstream.plan.nodes import find_node
from slipstream.plan.offer_table import Offer
from slipstream.plan.search import Prospect, Wanted, search


def prospects_there(wanted: Wanted, machine: Machine) -> list[Prospect]:
    """The best layout on each number of such machines; none, if its GPUs are unknown."""
    offer = _offer(machine)
    return search(wanted, [offer], "never", slower=True).prospects if offer else []


def _offer(machine: Machine) -> Offer | None:
    """Its network is the cautious guess for machines of which nothing is known."""
    try:
        accelerator = find_accelerator(machine.gpus[0])
    except (IndexError, ValueError):
        return None
    node, count = find_node("", ""), len(machine.gpus)
    network = node.network * (count if node.per_device else 1)
    return Offer(
        "", str(machine), accelerator, count, machine.cores, machine.memory, "", 0.0, None, accelerator.link,
        accelerator.link_kind, network, node.network_kind, True, datetime.date.today(),
    )  # fmt: skip
