"""Where things are kept that can be made again: prepared data, profiles of machines, prices, compiled code."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def compiler_environment() -> dict[str, str]:
    """Where torch's compiler keeps its code; it asks when torch is imported."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(cache_folder() / "compiled")}


def keep_bytecode() -> None:
    """Where torch has come without Python's bytecode and none may be written beside it, as in many container images,
    keep it in the cache: else every start compiles thousands of files, which takes longer than to load them."""
    if not sys.pycache_prefix and _must_compile("torch"):
        sys.dont_write_bytecode, sys.pycache_prefix = False, str(cache_folder() / "bytecode")


def bytecode_environment() -> dict[str, str]:
    """What `keep_bytecode` has decided, for a process to come."""
    return {"PYTHONPYCACHEPREFIX": sys.pycache_prefix, "PYTHONDONTWRITEBYTECODE": ""} if sys.pycache_prefix else {}


def _must_compile(package: str) -> bool:
    found = find_spec(package)
    if found is None or found.origin is None:
        return False
    folder = Path(found.origin).parent
    may_write = not sys.dont_write_bytecode and os.access(folder, os.W_OK)
    return not may_write and not (folder / "__pycache__").exists()


def cache_folder() -> Path:
    """`$SLIPSTREAM_CACHE`, else `slipstream` in the user's cache folder."""
    if own := os.environ.get("SLIPSTREAM_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "slipstream"
