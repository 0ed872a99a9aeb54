"""`slipstream doctor`: what this machine is, and what is missing."""

import importlib.metadata
import importlib.util
import json
import platform
import shutil
from pathlib import Path
from typing import Any

from slipstream.cli.options import AsJson

_EXTRAS = {"transformers": "hf", "sklearn": "digits", "pyarrow": "parquet", "gigatoken": "tokens"}


def command(as_json: AsJson = False) -> None:
    """Say what this machine is and what is missing."""
    found = examine()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for key in ("slipstream", "python", "torch", "machine", "gpus", "disk_free_gb", "workers"):
        print(f"{key:<14} {found[key] or 'none'}")
    for package, state in found["extras"].items():
        print(f"{package:<14} {state}")
    print("\n".join(f"problem: {problem}" for problem in found["problems"]) or "all is well")


def examine() -> dict[str, Any]:
    """The facts, and what stands in the way of training here."""
    import torch

    from slipstream import __version__
    from slipstream.plan import this_machine

    machine = this_machine()
    disk = shutil.disk_usage(Path.cwd()).free
    problems = []
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        problems.append("torch was built without gloo: only one worker can run; install torch from PyPI")
    if disk < 2e9:
        problems.append(f"only {disk / 1e9:.1f} GB of disk are free here: checkpoints may not fit")
    if Path("/dev/nvidiactl").exists() and not machine.gpus:
        problems.append("there is an NVIDIA GPU, but torch cannot use it: install a CUDA build of torch")
    return {
        "slipstream": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "machine": str(machine),
        "gpus": list(machine.gpus),
        "disk_free_gb": round(disk / 1e9, 1),
        "workers": machine.room("auto"),
        "extras": {name: _state(name, extra) for name, extra in _EXTRAS.items()},
        "problems": problems,
    }


def _state(package: str, extra: str) -> str:
    if importlib.util.find_spec(package) is None:
        return f'missing: pip install "slipstream[{extra}]"'
    return importlib.metadata.version({"sklearn": "scikit-learn"}.get(package, package))
