"""What SkyPilot itself makes of tasks: parsed, validated, and the offer that its optimiser picks, with a catalog made
from our table of offers. Run in a process of its own, whose home folder has the catalog.

    python sky_choice.py TASK.yaml …
"""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from slipstream.fleet.skypilot import CLOUDS
from slipstream.plan.offers import Offer

_COLUMNS = (
    "InstanceType", "AcceleratorName", "AcceleratorCount", "vCPUs", "MemoryGiB", "GpuInfo", "Price", "SpotPrice",
    "Region", "Arch", "LocalDisk", "Generation",
)  # fmt: skip
_ZONED = ("aws", "gcp")
_GOOGLE = {"A100-40GB": "A100"}
"""SkyPilot knows the accelerators of Google's machines by itself, and calls them so."""


def write_catalog(folder: Path, offers: Sequence[Offer]) -> None:
    """Ours as SkyPilot's, a table for each cloud."""
    for cloud in CLOUDS:
        path = folder / cloud / "vms.csv"
        path.parent.mkdir(parents=True)
        mine = [offer for offer in offers if offer.cloud == cloud and offer.accelerator.kind == "gpu"]
        with path.open("w") as file:
            table = csv.writer(file)
            table.writerow([*_COLUMNS, "AvailabilityZone"] if cloud in _ZONED else _COLUMNS)
            table.writerows(row for offer in mine for row in _rows(offer))


def _rows(offer: Offer) -> Iterator[list[Any]]:
    zone = [f"{offer.region}-a"] if offer.cloud in _ZONED else []
    name, where = offer.accelerator.name, [offer.region, "x86_64", "", "V2", *zone]
    size, price = [offer.cores, offer.memory / 2**30, ""], [offer.price, offer.spot or ""]
    if offer.cloud == "gcp":  # where a machine and what is in it have prices of their own
        yield [offer.machine, "", "", *size, *price, *where]
        yield ["", _GOOGLE.get(name, name), offer.count, "", "", "", 0, 0, *where]
    else:
        yield [offer.machine, name, offer.count, *size, *price, *where]


def choose(path: str) -> dict[str, Any]:
    """Which machine SkyPilot would rent for a task."""
    import sky
    from sky.optimizer import Optimizer

    task = sky.Task.from_yaml(path)
    with sky.Dag() as dag:
        dag.add(task)
    task.validate()
    Optimizer.optimize(dag, quiet=True)
    best = task.best_resources
    return {
        "cloud": str(best.cloud).lower(),
        "machine": best.instance_type,
        "region": best.region,
        "spot": best.use_spot,
        "machines": task.num_nodes,
        "price": best.get_cost(3600),
        "accelerators": best.accelerators,
        "down": best.autostop_config.down,
        "recovery": best.job_recovery,
    }


def main() -> None:
    from sky import check, global_user_state
    from sky.clouds import CloudCapability

    allowed = check._get_workspace_allowed_clouds("default")  # as if there were an account on every cloud
    global_user_state.set_allowed_clouds(allowed, "default")
    global_user_state.set_enabled_clouds(list(CLOUDS), CloudCapability.COMPUTE, "default")
    print(json.dumps([choose(path) for path in sys.argv[1:]]))


if __name__ == "__main__":
    main()
