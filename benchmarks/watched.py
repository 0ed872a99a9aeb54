"""`slipstream train` watched from outside: a process with all that it starts, and the steps in its metrics."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from common import console
from slipstream.runs import read_lines

UNSTEADY = 0.4
"""Part of the steps, from the first one on, that does not count."""
FEWEST_UNSTEADY = 5
TICK = 0.05
_DIE_WITH_PARENT = 1
"""Of prctl(2): which signal to send when the parent is gone."""
_C = ctypes.CDLL(None)


class Timed(NamedTuple):
    seconds: list[float]
    """Of every step."""
    losses: list[float]
    first: float
    """When the first step had ended, by the clock on the wall."""
    memory: int | None
    """Most bytes that tensors took on the device."""


class Failed(RuntimeError):
    """A side came to no end, or to a bad one."""


def train(job: Path, folder: Path, steps: int, environment: dict[str, str], seconds: float) -> Timed:
    """So many steps of a job, which has more: it is stopped then. What is left of it lies in the folder."""
    program = [sys.executable, "-c", "from slipstream.cli import main; main()"]
    run = folder / "run"
    metrics, first, lines, until = run / "metrics.jsonl", 0.0, 0, time.monotonic() + seconds
    command = [*program, "train", str(job), "--workers", "1", "--run-dir", str(run)]
    with started(command, folder, environment) as process:
        while lines < steps:
            if process.poll() is not None or time.monotonic() > until:
                reason = why(process, seconds, folder / "log", run / "logs" / "rank-0.log")
                interrupt(process)
                raise Failed(reason)
            time.sleep(TICK)
            lines = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            first = first or (time.time() if lines else 0.0)
        interrupt(process)
    found = list(read_lines(metrics))[:steps]
    memory = max((line["memory"] for line in found if "memory" in line), default=None)
    return Timed([line["seconds"] for line in found], [line["loss"] for line in found], first, memory)


@contextmanager
def started(command: list[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own session, which is gone at the end with all that it started; also where this one was killed,
    for training that went on would slow down whatever is measured next. What it says is in `log`."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: _C.prctl(_DIE_WITH_PARENT, signal.SIGKILL),
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):  # where all of it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def finish(command: list[str], folder: Path, environment: dict[str, str], seconds: float) -> None:
    """Such a process, to its good end."""
    with started(command, folder, environment) as process:
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
        if process.poll() != 0:
            raise Failed(why(process, seconds, folder / "log"))


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C twice, which stops at once, without a checkpoint; the workers are gone when the launcher is."""
    for _ in range(2 if process.poll() is None else 0):
        process.send_signal(signal.SIGINT)
        time.sleep(4 * TICK)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        console.print("slipstream did not stop when asked and is killed", style="dim")


def why(process: subprocess.Popen[bytes], seconds: float, *logs: Path) -> str:
    """How it ended, and the last that it said."""
    code = process.poll()
    how = f"not done after {seconds:.0f} s" if code is None else f"ended with {code}"
    return "\n".join((how, *(path.read_text(errors="replace")[-3000:] for path in logs if path.exists())))


def environment(cache: Path, on_gpu: bool, peers: Path | None = None) -> dict[str, str]:
    """Compile caches of its own; no network; on the path what is not installed."""
    path = os.pathsep.join(part for part in (str(peers or ""), os.environ.get("PYTHONPATH", "")) if part)
    values = {
        "PYTHONPATH": path,
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "SLIPSTREAM_CACHE": str(cache / "slipstream"),  # what was found by measuring, too
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",  # a side that is stopped has said what it had to say
    }
    return values if on_gpu else {**values, "CUDA_VISIBLE_DEVICES": ""}


def steady(values: Sequence[float]) -> Sequence[float]:
    """Those of the steps that count."""
    return values[min(max(round(UNSTEADY * len(values)), FEWEST_UNSTEADY), len(values) - 1) :]
