"""Slipstream trains neural networks on rented machines: one job file, one command, one curve."""

from typing import TYPE_CHECKING, Any

from slipstream.version import VERSION as __version__

__all__ = ["Job", "JobError", "Result", "__version__", "load_job", "resume", "train"]

if TYPE_CHECKING:
    from slipstream.api import resume, train
    from slipstream.job import Job, JobError, load_job
    from slipstream.runs.result import Result

_HOME = dict.fromkeys(("Job", "JobError", "load_job"), "slipstream.job") | {
    "Result": "slipstream.runs.result",
    "resume": "slipstream.api",
    "train": "slipstream.api",
}


def __getattr__(name: str) -> Any:
    """Load a name when it is first used, so that `import slipstream` costs next to nothing."""
    if name not in _HOME:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOME[name]), name)
