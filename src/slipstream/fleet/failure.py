"""What went wrong: each worker's own record of it, which one came first, and the report a person reads."""

import json
import signal
import time
import traceback
from dataclasses import asdict, dataclass

from slipstream.fleet.scratch import Scratch
from slipstream.runs import RunFolder

PROGRAM = "program"
"""The phase of a program that is not ours: it tells nothing more."""
WORKER_FAILED, HANGING, NONFINITE, NO_DATA, INTERRUPTED = 3, 4, 5, 7, 130
EARLY = "it was stopped before it began"
FINAL = (2, NONFINITE, 6)
"""Exit codes of an agent after which it would end the same way again: refused, not finite, at a limit."""


@dataclass(frozen=True)
class Failure:
    """One worker's end."""

    rank: int
    step: int
    phase: str
    error: str
    """The exception's name; `killed` or `hanging` where there was none."""
    message: str
    trace: str = ""
    time: float = 0.0

    @property
    def exit_code(self) -> int:
        """What the command returns."""
        codes = {"NonFiniteLoss": NONFINITE, "hanging": HANGING, "StorageGone": NO_DATA, "StorageLacks": NO_DATA}
        return codes.get(self.error, WORKER_FAILED)


def write_failure(scratch: Scratch, rank: int, step: int, phase: str, error: BaseException) -> None:
    """Leave a record for the launcher; called by the worker that failed."""
    trace = "".join(traceback.format_exception(error))
    failure = Failure(rank, step, phase, type(error).__name__, str(error), trace, time.time())
    scratch.failure(rank).write_text(json.dumps(asdict(failure)))


def read_failure(scratch: Scratch, rank: int) -> Failure | None:
    """The record that a worker left, if it could."""
    try:
        return Failure(**json.loads(scratch.failure(rank).read_text()))
    except (OSError, ValueError):
        return None


def killed(rank: int, step: int, phase: str, code: int, who: str) -> Failure:
    """A rank that ended without a word."""
    if code < 0:
        name = signal.Signals(-code).name
        return Failure(rank, step, phase, "killed", f"{who} was killed by signal {-code} ({name})")
    return Failure(rank, step, phase, "killed", f"{who} ended by itself with exit code {code} and no exception")


def first_cause(failures: list[Failure]) -> Failure:
    """The failure the others follow from: a death without a word, else the earliest that is not a lost connection. Who
    only gave up without a word, as a library does that has lost the others, comes after who says why."""

    def order(failure: Failure) -> tuple[bool, bool, bool, float]:
        gave_up = failure.error == "ended" or "(SIGABRT)" in failure.message
        return failure.error != "killed" or gave_up, _is_echo(failure), gave_up, failure.time

    return min(failures, key=order)


_LOST = (
    "closed by peer", "Connection reset", "Broken pipe", "Socket closed", "timed out", "connectFullMesh",
    "got 0 bytes", "Connection was likely closed", "remote process exited",
)  # fmt: skip


def _is_echo(failure: Failure) -> bool:
    """Whether a failure only says that another worker is gone."""
    return failure.error == "PeerStopped" or any(word in failure.message for word in _LOST)


def hint(failure: Failure) -> str | None:
    """What to do, where that is known."""
    text = f"{failure.error} {failure.message}"
    for words, advice in _HINTS:
        if any(word in text for word in words):
            return advice
    return None


_HINTS: list[tuple[tuple[str, ...], str]] = [
    (
        ("StorageGone", "StorageLacks"),
        "the data's storage did not answer for data.patience, or lacks a file; when it is back, `slipstream resume` "
        "goes on from the checkpoint of the last step",
    ),
    (
        ("No space left", "Disk quota"),
        "the disk is full: free some space, then `slipstream resume`; the last checkpoint is whole",
    ),
    (
        ("Read-only file system", "Permission denied"),
        "the run folder cannot be written: make it writable, or move it and resume it there",
    ),
    (
        ("out of memory", "OutOfMemory", "can't allocate memory", "Cannot allocate memory"),
        "out of memory: lower layout.micro_batch, data.sequence or the model's size",
    ),
    (
        ("(SIGKILL)",),
        "if nobody did this, the system was out of memory: lower layout.micro_batch or the number of workers; "
        "then `slipstream resume`",
    ),
    (
        ("(SIGBUS)",),
        "a file that is mapped into memory has become shorter, or its disk failed: if the data is a prepared folder, "
        "`slipstream data verify` names the file; mend it, then `slipstream resume`",
    ),
    (("(SIGTERM)", "(SIGINT)", "(SIGHUP)"), "somebody or some scheduler ended it; `slipstream resume` goes on"),
    (
        ("NonFiniteLoss",),
        "lower the learning rate, add train.clip or warm-up, look at those samples; or set train.on_nonfinite: skip",
    ),
    (
        ("mat1 and mat2", "size mismatch", "must match the size", "they must have", "they must be the same",
         "cannot be multiplied", "Given groups", "expected input", "size of tensor"),
        "a shape mismatch: what the model takes does not fit what the data gives; compare model and data",
    ),
    (
        ("index out of range in self", "out of bounds"),
        "a token or class number is larger than the model has room for: check vocabulary or classes",
    ),
    (
        ("does not have a deterministic implementation",),
        "the model's operation adds up in no fixed order: use another one, or set train.deterministic: false",
    ),
    (("Address already in use", "EADDRINUSE"), "a port is in use: end the program that holds it, or try again"),
    (
        ("hanging",),
        "the stacks above show where each worker was; if it was only slow, raise limits.step or limits.first_step",
    ),
]  # fmt: skip


_SAY_ALL = ("StorageGone", "StorageLacks", "DamagedShard")
"""Errors that name what is wrong: where in our code it was found helps nobody. The worker's log has it."""


def summarise(failure: Failure) -> str:
    """What happened and what to do, in two lines."""
    message = failure.message if len(failure.message) < 600 else failure.message[:600] + " …"
    where = "" if failure.phase == PROGRAM else f" at step {failure.step} in {failure.phase}"
    what = f"rank {failure.rank} failed{where}: {failure.error}: {message}"
    advice = hint(failure)
    return f"{what}\nwhat to do: {advice}" if advice else what


def render(failure: Failure, run: RunFolder, stacks: dict[int, str]) -> str:
    """The report: stacks and traceback first, what happened and what to do last, where the eye is."""
    parts = [f"--- rank {rank} was here ---\n{stack.strip()}" for rank, stack in sorted(stacks.items())]
    if failure.trace and failure.error not in _SAY_ALL:
        parts.append(failure.trace.strip())
    summary = [summarise(failure), f"logs: {run.logs}/rank-{failure.rank}.log"]
    return "\n\n".join([*parts, "\n".join(summary)])
