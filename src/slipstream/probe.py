"""Probing this machine: what its matrices, memory and workers' exchange can do, and what our program makes of it."""

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.api import train
from slipstream.job import Job
from slipstream.job.data import TokenData
from slipstream.job.models import DecoderModel
from slipstream.plan import Machine, Plan, make_plan, this_machine
from slipstream.plan.accelerators import find_accelerator
from slipstream.plan.calibrate import fit_rates
from slipstream.plan.grid import Grid, style_of
from slipstream.plan.profile import Profile
from slipstream.plan.rates import Rates, fitted_rates
from slipstream.plan.time import step_time
from slipstream.plan.work import work_of_decoder
from slipstream.rehearsal import Until, rehearse
from slipstream.runs import RunFolder, read_lines
from slipstream.runs.cache import compiler_environment

STEPS = 16
_UNSTEADY = 3
"""First steps that are not counted."""
Shape = tuple[int, int, int, int, int, str]
"""Layers, width, tokens, vocabulary, batch, layout (and precision)."""
CPU_SHAPES: tuple[Shape, ...] = (
    (2, 64, 64, 256, 4, ""),
    (8, 64, 32, 256, 8, ""),
    (4, 128, 128, 512, 8, ""),
    (2, 256, 128, 2048, 8, ""),
    (4, 192, 128, 4096, 16, ""),
    (2, 384, 256, 1024, 4, ""),
)
CPU_SHARED: tuple[Shape, ...] = (
    (4, 128, 128, 512, 8, "replicate=2"),
    (4, 192, 128, 4096, 16, "replicate=2"),
    (2, 256, 128, 2048, 8, "shard=2"),
    (4, 128, 128, 512, 8, "tensor=2"),
    (4, 192, 128, 4096, 16, "pipeline=2,micro_batch=8"),
)
GPU_SHAPES: tuple[Shape, ...] = (
    (24, 256, 256, 8192, 8, ""),  # these two wait for the processor
    (4, 512, 512, 8192, 16, ""),
    (8, 1024, 1024, 32000, 16, ""),
    (4, 2048, 4096, 32000, 4, ""),
    (2, 4096, 2048, 128256, 8, ""),  # mostly head
    (4, 1024, 8192, 8192, 4, ""),  # mostly attention
)
FP8_SHAPES: tuple[Shape, ...] = ((8, 2048, 2048, 32000, 8, "precision=fp8"), (4, 4096, 4096, 32000, 4, "precision=fp8"))
_PRODUCTS: dict[str, tuple[tuple[int, int, int], ...]] = {
    "cuda": ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192)),
    "cpu": ((64, 64, 64), (256, 256, 256), (1024, 1024, 1024), (1024, 256, 256)),
}
"""Sizes of the products that are measured: m, n, k."""
FITTED = (
    "matrix_16", "matrix_start", "attention", "stream_traffic", "inner_traffic", "launch", "loss_traffic",
    "optimizer_bytes", "step",
)  # fmt: skip
FITTED_FP8 = ("matrix_8",)
FITTED_SHARED = ("link", "link_latency", "gradients_hidden", "tensor_hidden", "network_latency")


def probe(say: Callable[[str], None]) -> Profile:
    """Measure for a minute or two."""
    for name, value in compiler_environment().items():
        os.environ.setdefault(name, value)
    import torch

    machine = this_machine()
    device = "cuda" if machine.gpus else "cpu"
    say("matrix products")
    peaks, products = _peaks(torch, machine, device)
    say("memory and the smallest operation")
    bandwidth, operation = _bandwidth(torch, device), _operation(torch, device)
    if device == "cpu" and machine.cores > 1 and peaks[str(machine.cores)] < peaks["1"]:
        say("other programs are computing here: what is measured now is not this machine alone; probe again later")
    workers = machine.room("auto")
    say("exchange between two workers") if workers > 1 else None
    link, latency = _exchange(device) if workers > 1 else (_link(machine), fitted_rates().link_latency)
    memory = torch.cuda.mem_get_info()[1] if machine.gpus else machine.memory
    profile = Profile(
        str(machine), device, datetime.now(UTC).date().isoformat(), torch.__version__, machine.cores, memory, peaks,
        bandwidth, operation, link, latency, products, asdict(_first_rates(operation, latency)), [],
    )  # fmt: skip
    if device == "cuda":
        measured = _measure_gpu(GPU_SHAPES + (FP8_SHAPES if machine.fp8 else ()), machine, say)
    else:
        measured = _measure(CPU_SHAPES + (CPU_SHARED if workers > 1 else ()), machine, say)
    return fit(profile, list(measured), machine)


def _link(machine: Machine) -> float:
    """Of the GPU's data sheet, where there is no second worker to measure it with."""
    try:
        return find_accelerator(machine.gpus[0] if machine.gpus else "").link
    except ValueError:
        return 1e9


def _first_rates(operation: float, latency: float) -> Rates:
    """Where the fit begins: a large product reaches what was measured, and a block is some thirty operations."""
    general = asdict(fitted_rates())
    return Rates(**{**general, "matrix_16": 0.95, "launch": 30 * operation, "link": 0.9, "link_latency": latency})


def _peaks(torch: Any, machine: Machine, device: str) -> tuple[dict[str, float], list[tuple[int, int, int, float]]]:
    """The best of several sizes, by threads or precision; and all sizes, with all threads or in bf16."""
    peaks: dict[str, float] = {}
    products: list[tuple[int, int, int, float]] = []
    kinds = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if machine.fp8:
        kinds["fp8"] = torch.float8_e4m3fn
    ways = kinds if device == "cuda" else {str(count): torch.float32 for count in sorted({1, machine.cores})}
    before = torch.get_num_threads()
    for name, dtype in ways.items():
        if device == "cpu":
            torch.set_num_threads(int(name))
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        found = [(*shape, _rate(torch, shape, dtype, device)) for shape in _PRODUCTS[device]]
        # On a CPU what counts is how much threads help with products of the size that small models have.
        peaks[name] = max(rate for *_, rate in found) if device == "cuda" else found[-1][-1]
        products = products if name == "fp8" else found
    torch.set_num_threads(before)
    return peaks, products


def _rate(torch: Any, shape: tuple[int, int, int], dtype: Any, device: str) -> float:
    m, n, k = shape
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(n, k, device=device).to(dtype).T
    from slipstream.train.kernels.fp8 import Short, multiply

    one = torch.ones((), device=device)
    fp8 = dtype == torch.float8_e4m3fn
    product = (lambda: multiply(Short(a, one), Short(b.T, one), torch.bfloat16)) if fp8 else (lambda: a @ b)
    return float(2 * m * n * k / _timed(torch, product, device))


def _bandwidth(torch: Any, device: str) -> float:
    numbers = 2**28 if device == "cuda" else 2**24
    source = torch.ones(numbers, device=device)
    target = torch.empty_like(source)
    return float(2 * 4 * numbers / _timed(torch, lambda: target.copy_(source), device))


def _operation(torch: Any, device: str) -> float:
    x = torch.zeros(16, device=device)
    return _timed(torch, lambda: x.add_(1.0), device, least=1000)


def _timed(torch: Any, work: Callable[[], Any], device: str, least: int = 3, seconds: float = 0.4) -> float:
    """The best of several rounds."""
    best, until = float("inf"), time.perf_counter() + seconds
    work()
    while time.perf_counter() < until:
        start = time.perf_counter()
        for _ in range(least):
            work()
        if device == "cuda":
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / least)
    return best


def _exchange(device: str) -> tuple[float, float]:
    """Bytes a second and least seconds of an all-reduce between two workers."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory(prefix="slipstream-probe-") as folder:
        ranks = [context.Process(target=_reduce, args=(rank, folder, device, results)) for rank in range(2)]
        for process in ranks:
            process.start()
        small, large, size = results.get(timeout=120)
        for process in ranks:
            process.join()
    return size / max(1e-9, large - small), small


def _reduce(rank: int, folder: str, device: str, results: Any) -> None:
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    store = torch._C._distributed_c10d.FileStore(str(Path(folder) / "store"), 2)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", store=store, rank=rank, world_size=2)
    seconds = []
    numbers = 2**22
    for count in (16, numbers):
        x = torch.zeros(count, device=device)
        rounds = []
        for _ in range(12):
            start = time.perf_counter()
            dist.all_reduce(x)
            if device == "cuda":
                torch.cuda.synchronize()
            rounds.append(time.perf_counter() - start)
        seconds.append(float(np.median(rounds[2:])))
    if rank == 0:
        results.put((*seconds, 4 * numbers))
    dist.destroy_process_group()


def probe_job(shape: Shape, folder: Path) -> Job:
    """A small decoder on random tokens."""
    layers, hidden, tokens, vocabulary, batch, layout = shape
    path = folder / f"tokens-{vocabulary}.npy"
    if not path.exists():
        np.save(path, np.random.default_rng(0).integers(0, vocabulary, 200_000).astype(np.int32))
    pairs = (pair.split("=") for pair in layout.split(",") if pair)
    chosen = {key: int(value) if value.isdigit() else value for key, value in pairs}
    precision = chosen.pop("precision", "auto")
    return Job.model_validate(
        {
            "name": "probe",
            "model": {"kind": "decoder", "layers": layers, "hidden": hidden, "heads": max(2, hidden // 64)},
            "data": {"source": str(path), "tokens": True, "sequence": tokens, "vocabulary": vocabulary},
            "train": {
                "steps": STEPS,
                "batch": batch,
                "optimizer": {"name": "adamw", "lr": 1e-4},
                "clip": {"norm": 1.0},
                "precision": precision,
            },
            "checkpoint": {"every": STEPS, "keep": 1},
            "layout": chosen or {"replicate": 1},
        }
    )


def _measure(shapes: tuple[Shape, ...], machine: Machine, say: Callable[[str], None]) -> Iterator[tuple[Job, float]]:
    with tempfile.TemporaryDirectory(prefix="slipstream-probe-") as folder:
        jobs = [probe_job(shape, Path(folder)) for shape in shapes]
        seconds: list[list[float]] = [[] for _ in jobs]
        # To and fro, and the better of both: what other programs take for a while is not the machine's nature.
        for number, index in enumerate([*range(len(jobs)), *reversed(range(len(jobs)))], 1):
            say(f"training steps, {number} of {2 * len(jobs)}")
            workers = make_plan(jobs[index], machine).layout.workers
            seconds[index].append(measure_step(jobs[index], workers, Path(folder) / str(number)))
        yield from ((job, min(both)) for job, both in zip(jobs, seconds, strict=True))


def _measure_gpu(
    shapes: tuple[Shape, ...], machine: Machine, say: Callable[[str], None]
) -> Iterator[tuple[Job, float]]:
    """In this process: a GPU does not tire of starting, but it takes ten seconds each time."""
    with tempfile.TemporaryDirectory(prefix="slipstream-probe-") as folder:
        for number, shape in enumerate(shapes, 1):
            say(f"training steps, {number} of {len(shapes)}")
            job = probe_job(shape, Path(folder))
            yield job, rehearse_step(job, machine)


def rehearse_step(job: Job, machine: Machine) -> float:
    """Seconds of a step, the median of the steady ones, in this process."""
    return _steady(rehearse(job, make_plan(job, machine), lambda path: Until(path, STEPS - 1)))


def measure_step(job: Job, workers: int, folder: Path) -> float:
    """Seconds of a step, the median of the steady ones."""
    if train(job, workers=workers, run_dir=folder).status == "stopped":
        raise KeyboardInterrupt  # whoever ended this run meant all of them
    return _steady(list(read_lines(RunFolder(folder).metrics)))


def _steady(lines: list[dict[str, Any]]) -> float:
    return float(np.median([line["seconds"] for line in lines[_UNSTEADY:]]))


def predict_step(job: Job, profile: Profile, machine: Machine) -> float:
    """What the planner says of a decoder's step on a machine with this profile."""
    return _predictor(job, profile, machine)(profile.fitted)


def _predictor(job: Job, profile: Profile, machine: Machine) -> Callable[[Rates], float]:
    """The same for any constants: a fit asks thousands of times."""
    plan = make_plan(job, machine)
    assert isinstance(job.model, DecoderModel), "the probe's jobs are decoders"
    assert isinstance(job.data, TokenData), "and their data are tokens"
    work = work_of_decoder(job.model, job.data.vocabulary, job.data.sequence)
    on = profile.hardware(plan.layout.workers, plan.precision)
    grid, batch = Grid.of(plan.layout), job.train.batch
    style = style_of(plan.precision, on_gpu=plan.device == "cuda")
    return lambda rates: float(step_time(work, grid, batch, on, rates, style).total)


def fit(profile: Profile, measured: list[tuple[Job, float]], machine: Machine) -> Profile:
    """The profile with constants that give these steps."""
    seconds = np.array([each for _, each in measured])
    plans = [make_plan(job, machine) for job, _ in measured]
    names = FITTED + (FITTED_SHARED if any(plan.layout.workers > 1 for plan in plans) else ())
    names += FITTED_FP8 if any(plan.precision == "fp8" for plan in plans) else ()
    predictors = [_predictor(job, profile, machine) for job, _ in measured]

    def predict(rates: Rates) -> Any:
        return np.array([predict_one(rates) for predict_one in predictors])

    rates = fit_rates(profile.fitted, names, predict, seconds)
    steps = [
        (_describe(job, plan), float(took), float(given))
        for (job, took), plan, given in zip(measured, plans, predict(rates), strict=True)
    ]
    return Profile(**{**asdict(profile), "rates": asdict(rates), "steps": steps})


def _describe(job: Job, plan: Plan) -> str:
    model = job.model
    assert isinstance(model, DecoderModel), "the probe's jobs are decoders"
    size = f"{model.layers} × {model.hidden}, {job.train.batch} × {job.data.sequence} tokens"  # type: ignore[union-attr]
    return f"{size}, {plan.layout}, {plan.precision}"
