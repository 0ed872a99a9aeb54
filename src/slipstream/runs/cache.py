"""Where things are kept that can be made again: prepared data, profiles of machines, prices, compiled code."""

import os
from pathlib import Path


def compiler_environment() -> dict[str, str]:
    """Where torch's compiler keeps its code; it asks when torch is imported."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "compiled")}


def cache_folder() -> Path:
    """`$SLIPSTREAM_CACHE`, else `slipstream` in the user's cache folder."""
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "slipstream"
