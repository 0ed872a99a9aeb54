"""The result of a run: what it came to."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from slipstream.runs.folder import RunError, RunFolder, write_text


@dataclass(frozen=True)
class Result:
    """What a run came to, or has come to when it was stopped."""

    run: str
    """The run's folder."""
    status: str
    """`finished`, or `stopped` at a limit or by a person: then `resume` goes on."""
    reason: str | None
    """Why it was stopped: interrupted, deadline or budget."""
    step: int
    samples: int
    tokens: int
    parameters: int
    loss: float | None
    """Of the last step."""
    val_loss: float | None
    """On all held-out samples, if there are any and the run is finished."""
    val_accuracy: float | None
    skipped: int
    """Updates left out for overflow or a loss that was not finite."""
    workers: int
    seconds: float
    """Running time, over all launches."""
    cost: float | None
    """In dollars, where the machine has a price."""
    sample: str | None
    """Text the model wrote at the end."""
    export: str | None
    """Folder with the weights."""
    step_seconds: float | None = None
    """Of a steady step, the median."""
    predicted_step_seconds: float | None = None
    """What the plan said of it."""
    memory: int | None = None
    """Most bytes that the first worker held on its GPU."""
    predicted_memory: int | None = None
    """What the plan said of the busiest worker."""
    data_wait: float | None = None
    """Part of the steps' time that the first worker waited for data."""
    sent: int | None = None
    """Bytes of gradients that the first worker sent in a step, where there are others."""
    compression: float | None = None
    """How many times more that would have been if gradients went as they are, in every step."""
    pushes_per_s: float | None = None
    """With servers: gradients a second that came to each, the median."""
    staleness: dict[str, int] | None = None
    """With asynchronous servers: how many updates came how many updates late."""


def steady_step(seconds: Sequence[float]) -> float:
    """The time of a step, without those at the start."""
    return median(seconds[len(seconds) // 4 :])


def part_waiting(lines: Sequence[dict[str, Any]]) -> float:
    """Part of the time of steps that was spent waiting for data, without those at the start."""
    steady = lines[len(lines) // 4 :]
    return float(sum(line.get("data_wait", 0.0) for line in steady) / sum(line["seconds"] for line in steady))


def mean_traffic(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Bytes sent in a step, how many times more that would have been without a codec, and with servers the gradients
    that came in a second; where there are others."""
    sent = [line["sent"] for line in lines if "sent" in line]
    if not any(sent):
        return {}
    plain = sum(line["sent"] * line["compression"] for line in lines if line.get("sent"))
    pushes = [line["pushes_per_s"] for line in lines if "pushes_per_s" in line]
    return {
        "sent": round(sum(sent) / len(sent)),
        "compression": round(plain / sum(sent), 3),
        "pushes_per_s": median(pushes) if pushes else None,
    }


def count_staleness(lines: Sequence[dict[str, Any]]) -> dict[str, int] | None:
    """A histogram of how late updates came, where that is known."""
    counts = Counter(line["staleness"] for line in lines if "staleness" in line)
    return {str(staleness): counts[staleness] for staleness in sorted(counts)} or None


def write_result(run: RunFolder, result: Result) -> None:
    """Write result.json."""
    write_text(run.result, json.dumps(asdict(result), indent=2, allow_nan=False) + "\n")


def read_result(run: RunFolder) -> Result | None:
    """The result, if there is one yet."""
    try:
        return Result(**json.loads(run.result.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise RunError(
            f"{run.result} is damaged; remove it, and `slipstream resume {run.path}` makes it anew"
        ) from None
