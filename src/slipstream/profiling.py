"""Where the time of a job goes: a few of its steps under torch's profiler, in this process, as one worker runs them."""

import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.api import LateRefusal
from slipstream.job import Job, dump, load_job, locate
from slipstream.plan import Plan, make_plan, this_machine
from slipstream.plan.here import Here
from slipstream.plan.wanted import states_of
from slipstream.planning import prepare_data, work_of
from slipstream.rehearsal import Until, rehearse
from slipstream.runs.cache import compiler_environment

WARM = 6
"""Steps before those that count: the first ones compile, and fill caches. On a GPU as many are timed without the
profiler, which slows the processor down, as then under it."""
_KINDS = (
    ("exchange", r"nccl|gloo|c10d|all_?reduce"),
    ("attention", r"flash|fmha|sdpa|attention"),
    ("optimiser", r"adamw|fused_?(adam|sgd|optim)|multi_tensor"),
    ("matrix", r"nvjet|gemm|cutlass|cublas|xmma|mkldnn|conv|dgrad|wgrad|(^|_|::)(add|b|baddb)?mm(_|$)|scaled_mm"),
    ("data", r"memcpy (htod|dtoh)|^data$"),
)
"""By what kernels and operations are called; all others are moving memory: norms, activations, sums, the loss."""


_Event = tuple[str, str, int, float]
"""Name, kind, calls in a step, seconds in a step."""


@dataclass(frozen=True)
class Spent:
    """Seconds of a step, and what they were for."""

    layout: str
    precision: str
    step: float
    kinds: dict[str, float]
    """matrix, attention, optimiser, exchange, data, memory, and idle, which is the rest of the step."""
    kernels: list[_Event]
    """The longest."""
    flops: float
    """Of a step's products."""
    attention_flops: float
    update_bytes: float
    """That an update reads and writes."""
    peak: float | None
    """FLOP/s that products could reach, where that is known."""
    bandwidth: float | None


def profile(job: str | Path, trace: Path, settings: Sequence[str] = (), steps: int = 4) -> Spent:
    """Run a few steps of a job under the profiler. `trace` names a file to write, for Perfetto or chrome://tracing."""
    asked = load_job(job, settings)
    try:
        if trace.is_dir() or not trace.absolute().parent.is_dir():
            raise ValueError(f"--trace: {trace} cannot be written: it is a folder, or in none")
        loaded = _in_short(asked, WARM + 2 * steps + 2)
        prepare_data(loaded, lambda _: None, str(Path.cwd()))
        plan = make_plan(loaded, this_machine(), workers=1)
    except LateRefusal as error:
        raise locate(error, job, settings) from error
    except ValueError as error:
        raise locate(LateRefusal(asked, str(error)), job, settings) from error
    seconds, events = _run(loaded, plan, steps, trace)
    return _summary(loaded, plan, seconds / steps, events)


def _in_short(job: Job, steps: int) -> Job:
    """The same job without what comes between steps."""
    split = ("shard", "tensor", "pipeline", "context")
    if many := next((axis for axis in split if (getattr(job.layout, axis) or 1) > 1), None):
        raise ValueError(f"layout.{many}: the work of one worker that has the whole model is profiled; leave it out")
    values = dump(job)
    lengths = dict.fromkeys((*type(job.train).LENGTHS, "ramp", "sample", "evaluate"))
    train = {key: value for key, value in {**values["train"], **lengths}.items() if value is not None}
    values["train"] = {**train, "steps": steps}
    values["data"] = {**values["data"], "validation": 0}
    kept = ("micro_batch", "recompute", "offload")
    values["layout"] = {"replicate": 1, **{key: values["layout"][key] for key in kept if values["layout"].get(key)}}
    return Job.model_validate({**values, "checkpoint": {"every": steps}, "limits": {}})


class _Watch(Until):
    """Times some steps, has the profiler look at as many and ends the run; phases get names in the trace."""

    def __init__(self, path: Path, profiler: Any, synchronise: Any, steps: int, apart: bool) -> None:
        """The profiler looks at the steps that are timed, or, `apart` from them, at those that come then."""
        self._profiler, self._synchronise = profiler, synchronise
        self._timed = range(WARM + 1, WARM + 1 + steps)
        first = self._timed.stop if apart else self._timed.start
        self._profiled = range(first, first + steps)
        self.seconds = 0.0
        super().__init__(path, self._profiled.stop - 1)

    def reached(self, number: int) -> None:
        if number in (self._timed.start, self._timed.stop, self._profiled.stop):
            self._synchronise()
        if number == self._timed.stop:  # the clock runs while the profiler neither starts nor stops
            self.seconds += time.perf_counter()
        if number == self._profiled.start:
            self._profiler.start()
        elif number == self._profiled.stop:
            self._profiler.stop()
        if number == self._timed.start:
            self.seconds -= time.perf_counter()
        super().reached(number)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        from torch.profiler import record_function

        with super().during(phase), record_function(phase):
            yield


def _run(job: Job, plan: Plan, steps: int, trace: Path) -> tuple[float, list[_Event]]:
    for name, value in {**compiler_environment(), "KINETO_LOG_LEVEL": "99"}.items():  # it would tell of start and end
        os.environ.setdefault(name, value)
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    on_gpu = plan.device == "cuda"
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if on_gpu else [ProfilerActivity.CPU]
    profiler = watch(activities=activities, acc_events=True)  # else it warns of cycles, of which there is but one
    pulses: list[_Watch] = []

    def pulse(path: Path) -> _Watch:
        # What a GPU's kernels take is the same under the profiler, and what it waits for the processor is not.
        pulses.append(_Watch(path, profiler, torch.cuda.synchronize if on_gpu else lambda: None, steps, apart=on_gpu))
        return pulses[0]

    rehearse(job, plan, pulse)
    profiler.export_chrome_trace(str(trace))
    return pulses[0].seconds, list((_kernels if on_gpu else _operations)(profiler, steps))


def _kernels(profiler: Any, steps: int) -> Iterator[_Event]:
    """What a GPU did."""
    for event in profiler.key_averages():
        if event.device_type.name == "CUDA" and (kind := kind_of(event.key)):
            yield event.key, kind, event.count // steps, event.self_device_time_total / 1e6 / steps


def _operations(profiler: Any, steps: int) -> Iterator[_Event]:
    """What a CPU did. Optimisers are made of operations like all others: where they were called says what they are."""
    calls: Counter[tuple[str, str]] = Counter()
    seconds: defaultdict[tuple[str, str], float] = defaultdict(float)
    for event in profiler.events():
        kind = kind_of(event.name)
        if kind == "memory" and _in_update(event):
            kind = "optimiser"
        if kind:
            calls[event.name, kind] += 1
            seconds[event.name, kind] += event.self_cpu_time_total / 1e6
    for (name, kind), took in seconds.items():
        yield name, kind, calls[name, kind] // steps, took / steps


def _in_update(event: Any) -> bool:
    while event := event.cpu_parent:
        if event.name == "update":
            return True
    return False


def _summary(job: Job, plan: Plan, step: float, events: list[_Event]) -> Spent:
    spent: defaultdict[str, float] = defaultdict(float)
    for _, kind, _, took in events:
        spent[kind] += took
    kinds = {name: spent[name] for name in (*(name for name, _ in _KINDS), "memory")}
    work = work_of(job)
    here = Here(this_machine()).hardware(1, plan.precision)
    attention = 3 * float(work.attention * work.layers) * job.train.batch
    each = 12 + 8 * states_of(job.train.optimizer)  # weight and gradient read, weight written; state read and written
    return Spent(
        layout=str(plan.layout),
        precision=plan.precision,
        step=step,
        kinds={**kinds, "idle": max(0.0, step - sum(kinds.values()))},
        kernels=sorted(events, key=lambda event: -event[-1])[:12],
        flops=float(work.flops) * job.train.batch - attention,
        attention_flops=attention,
        update_bytes=each * float(work.parameters),
        peak=float(here.peak) if here else None,
        bandwidth=float(here.bandwidth) if here else None,
    )


_PHASES = ("forward", "backward", "update", "exchange", "evaluate", "checkpoint", "build")


def kind_of(name: str) -> str | None:
    """What a kernel or operation is for; None of what only has a name, such as a phase of the loop."""
    if name in _PHASES or name.startswith(("ProfilerStep", "Optimizer.", "## ", "Torch-Compiled")):
        return None
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name, re.IGNORECASE)), "memory")
