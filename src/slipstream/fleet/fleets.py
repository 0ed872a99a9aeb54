"""The fleets by their names. Each is a file beside this one, loaded when it is asked for."""

from importlib import import_module

from slipstream.fleet.base import Fleet
from slipstream.job.machines import Machines

FLEETS = {
    "local": "slipstream.fleet.local:LocalFleet",
    "ray": "slipstream.fleet.ray:RayFleet",
    "slurm": "slipstream.fleet.slurm:SlurmFleet",
    "kubernetes": "slipstream.fleet.kubernetes:KubernetesFleet",
    "skypilot": "slipstream.fleet.skypilot:SkyPilotFleet",
}


def open_fleet(name: str, settings: Machines) -> Fleet:
    """The fleet of this name, with what a job file says of it."""
    module, _, kind = FLEETS[name].partition(":")
    fleet: Fleet = getattr(import_module(module), kind)(settings)
    return fleet
