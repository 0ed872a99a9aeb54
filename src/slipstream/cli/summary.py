"""A run in a few words, from its folder alone."""

from typing import Any

from slipstream.runs import RunError, RunFolder, read_lines
from slipstream.runs.result import read_result

_ENDS = {"failure": "failed", "refused": "failed", "finished": "finished", "stopped": "stopped"}
"""By the last event, where there is no result. A program leaves none."""


def summarise(run: RunFolder) -> dict[str, Any]:
    """Where a run stands: running, finished, stopped (at a limit or by a person), failed, killed or damaged."""
    try:
        return _read(run)
    except RunError as error:
        nothing = {"step": 0, "samples": 0, "loss": None, "val_loss": None, "seconds": 0.0}
        return {"run": str(run.path), "status": "damaged", "problem": str(error), **nothing}


def _read(run: RunFolder) -> dict[str, Any]:
    result = read_result(run)
    lines = list(read_lines(run.metrics))
    last = lines[-1] if lines else {}
    judged = [line["val_loss"] for line in lines if "val_loss" in line]
    return {
        "run": str(run.path),
        "status": _status(run, result.status if result else None),
        "step": last.get("step", 0),
        "samples": last.get("samples", 0),
        "loss": last.get("loss"),
        "val_loss": judged[-1] if judged else None,
        "seconds": round(run.seconds_spent(), 1),
    }


def _status(run: RunFolder, ended: str | None) -> str:
    if run.is_running:
        return "running"
    if ended:
        return ended
    last = next((event["event"] for event in reversed(list(read_lines(run.events)))), None)
    return _ENDS.get(last or "", "killed")
