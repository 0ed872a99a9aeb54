"""1. Choose: which machine, how to split the work over it, and in what precision."""

from slipstream.plan.layout import Layout, Place
from slipstream.plan.machine import Machine, this_machine
from slipstream.plan.plan import Network, Plan, make_plan

__all__ = ["Layout", "Machine", "Network", "Place", "Plan", "make_plan", "this_machine"]
