"""The planning door: from a job file to a plan, for this machine or for any that can be rented."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from pydantic import ValidationError

from slipstream.data import expected_facts, open_dataset, prepare
from slipstream.job import Job, JobError, load_job, locate
from slipstream.job.base import refuse
from slipstream.job.codecs import coding_nothing
from slipstream.job.file import Problem
from slipstream.job.job import total_samples
from slipstream.plan import Layout, Machine, Plan, make_plan, this_machine
from slipstream.plan.cost import THIS_MACHINE
from slipstream.plan.here import Here
from slipstream.plan.machine import ANY_MACHINE
from slipstream.plan.plan import Predicted, refuse_on_gpus
from slipstream.runs import RunError, RunFolder, is_run, read_lines, write_yaml
from slipstream.runs.result import steady_step

if TYPE_CHECKING:
    from slipstream.job.job import Limits
    from slipstream.plan.check import Score
    from slipstream.plan.choose import Choice, Objective
    from slipstream.plan.offer_table import Offer
    from slipstream.plan.search import Found, Prospect, Wanted
    from slipstream.plan.work import Work
    from slipstream.train.dry_run import Held

RUNS = Path("runs")
"""Where runs go when nothing else is said."""


class LateRefusal(JobError):
    """What is wrong with a job shows only beside the machine, the data or the model."""

    def __init__(self, job: Job, message: str) -> None:
        super().__init__([Problem(job.name, "", message)])


def plan(
    job: str | Path,
    *,
    settings: Sequence[str] = (),
    objective: "Objective | None" = None,
    count: int = 6,
    here: bool = False,
    calibrate: str | Path | None = None,
) -> "Choice":
    """The best machines and layouts for a job within its limits, with what they would take and cost.

    `here` plans for this machine alone; `calibrate` names a run whose measured steps correct the predictions.
    """
    from slipstream.plan.choose import SURE, SURE_CALIBRATED, choose, larger_batch
    from slipstream.plan.offers import load_offers
    from slipstream.plan.search import kinds, search
    from slipstream.plan.wanted import wanted_of

    loaded = load_job(job, settings)
    try:
        if here and calibrate:
            raise RunError("--calibrate has no effect with --here: runs on this machine correct its predictions anyway")
        scale = _scale_of(find_run(calibrate)) if calibrate else 1.0
        work = work_of(loaded)
        _refuse_useless_codec(loaded, work)
        wanted = wanted_of(loaded, work, _length(loaded))
        if here:
            return choose(wanted, _search_here(loaded, wanted), objective, count, SURE_CALIBRATED)
        refuse_on_gpus(loaded)
        limits = loaded.limits
        offers = _within(limits, load_offers())
        if not any(offer.accelerator.kind == "gpu" for offer in offers):
            raise ValueError("limits.gpus: none of these is a GPU, and only GPUs are planned for")
        if not kinds(offers, wanted.precisions):
            raise ValueError(
                f"train.precision {' or '.join(wanted.precisions)}: none of these GPUs computes in it; use another "
                "precision, such as fp16, or other GPUs"
            )
        found = search(wanted, offers, limits.spot, scale=scale)
        choice = choose(wanted, found, objective, count, SURE_CALIBRATED if calibrate else SURE)
        same = [offer for offer in offers if offer.accelerator == choice.plans[0].offer.accelerator]
        hint = larger_batch(choice, lambda other: search(other, same, limits.spot, scale=scale))
        return replace(choice, hints=[*choice.hints, hint]) if hint else choice
    except (JobError, RunError):
        raise
    except ValueError as error:
        raise locate(LateRefusal(loaded, str(error)), job, settings) from error


def _within(limits: "Limits", offers: "Sequence[Offer]") -> "tuple[Offer, ...]":
    """The offers that the limits admit. Raises ValueError with the key of a name that is not there."""
    from slipstream.plan.offers import filter_offers

    named = {
        "clouds": {"clouds": limits.clouds},
        "regions": {"regions": limits.regions},
        "gpus": {"gpu": ",".join(limits.gpus or ())},
    }
    left = tuple(offers)
    for key, names in named.items():
        try:
            left = filter_offers(left, **names)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"limits.{key}: {error}") from error
    return left


def _search_here(job: Job, wanted: "Wanted") -> "Found":
    machine = this_machine()
    here = Here(machine)
    if not here.known:
        raise ValueError("nothing is known of this machine's speed; `slipstream probe` measures it in two minutes")
    workers = machine.room(job.machines.device)
    if job.machines.device == "cpu" or not machine.gpus:
        wanted = replace(wanted, precisions=("fp32",) if job.train.precision == "auto" else (job.train.precision,))
    return here.search(wanted, workers, job.machines.price_per_hour or 0.0)


_ENOUGH_STEPS = 5


def _scale_of(run: RunFolder) -> float:
    """What a run's steps took beside what its plan said."""
    before, seconds = read_plan(run), [float(line["seconds"]) for line in read_lines(run.metrics)]
    if before is None or before.predicted is None or len(seconds) < _ENOUGH_STEPS:
        raise RunError(
            f"{run.path} cannot calibrate a plan: it needs a prediction (`slipstream probe` before the run) and at "
            f"least {_ENOUGH_STEPS} steps"
        )
    if load_job(run.job).exchange.kind != "allreduce":
        raise RunError(f"{run.path} cannot calibrate a plan: with its exchange no step is like another")
    if before.device == "cpu":
        raise RunError(f"{run.path} ran on a CPU, which says nothing of rented GPUs")
    return steady_step(seconds) / before.predicted.step_seconds


def check_plans(tables: Sequence[Path]) -> "Score":
    """Score the planner against published results."""
    from slipstream.plan.check import check

    try:
        return check(tables)
    except ValueError as error:
        raise RunError(str(error)) from error


def save_plan(choice: "Choice", path: Path) -> None:
    """Write the first plan of a choice into a file that a person may edit and `train --plan` takes."""
    from slipstream.plan.choose import as_values

    write_yaml(path, as_values(choice.plans[0], choice.sure, choice.wanted.agreement))


def _read_saved_plan(path: Path) -> tuple[dict[str, Any], Layout]:
    try:
        saved = yaml.safe_load(path.read_text())
        if not isinstance(saved, dict) or "layout" not in saved:
            raise ValueError("it has no layout")
        return saved, Layout.model_validate(saved["layout"])
    except OSError as error:
        raise RunError(f"the plan {path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        problems = "; ".join(f"layout.{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise RunError(f"{path}: {problems}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise RunError(f"{path} is no plan that `slipstream plan --save` writes: {error}") from error


def settings_of(path: Path, anywhere: bool = False) -> list[str]:
    """What a saved plan says of a job, as settings. Raises RunError if it is no plan, or one for other machines than
    this, unless it may be for any."""
    saved, layout = _read_saved_plan(path)
    machine = this_machine()
    there = machine.room("auto")
    offer = saved.get("offer") or {}
    kind = str(offer.get("accelerator", "")).partition("-")[0]
    elsewhere = offer.get("cloud", THIS_MACHINE) != THIS_MACHINE and not any(kind in gpu for gpu in machine.gpus)
    if not anywhere and (elsewhere or layout.workers > there):
        meant = f"{saved.get('machines')} × {offer.get('cloud')} {offer.get('machine')} ({offer.get('accelerator')})"
        raise RunError(
            f"{path} is a plan for {layout.workers} workers on {meant}, and this machine is {machine}; "
            "run it there, or plan for this machine: slipstream plan JOB --here"
        )
    settings = [f"layout.{name}={value}" for name, value in layout.choices.items() if name in _ALWAYS or value != 1]
    return [*settings, f"train.precision={saved['precision']}"] if saved.get("precision") else settings


_ALWAYS = ("replicate", "micro_batch")


def work_of(job: Job) -> "Work":
    """What a step of a job consists of."""
    from slipstream.plan.wanted import decoder_of

    facts = expected_facts(job)
    known = decoder_of(job, facts.outputs)
    if known is not None:
        return known
    from slipstream.train.measured import measured_work

    _find_modules_in(str(Path.cwd()))
    return measured_work(job, facts)


def _length(job: Job) -> int:
    """Samples of the whole run; where it is counted in epochs, the data must be looked at."""
    if job.train.epochs is None:
        return total_samples(job, 0)
    prepare_data(job, lambda _: None, str(Path.cwd()))
    return total_samples(job, len(open_dataset(job)))


def dry_run(job: str | Path, *, settings: Sequence[str] = (), workers: int | None = None, rank: int = 0) -> "Held":
    """What one rank of a job's layout would hold, counted without memory and without the other ranks."""
    from slipstream.train.dry_run import dry_run

    loaded = load_job(job, settings)
    try:
        plan = _make_plan(loaded, workers, ANY_MACHINE)
        if loaded.train.precision == "auto" and loaded.machines.device != "cpu":
            plan = plan.model_copy(update={"precision": "bf16"})
        if rank >= plan.layout.workers:
            raise LateRefusal(loaded, f"there is no rank {rank} among {plan.layout.workers} workers")
        return dry_run(loaded, plan, rank, expected_facts(loaded))
    except JobError as error:
        raise locate(error, job, settings) from error
    except ValueError as error:
        raise locate(LateRefusal(loaded, str(error)), job, settings) from error


def plan_here(job: Job, workers: int | None, before: Plan | None) -> Plan:
    """The plan for this machine, with what it is expected to take. Raises LateRefusal if it cannot fit."""
    if job.layout.auto and before and workers == before.layout.workers:
        return before  # a run goes on as it began
    wanted = _wanted_if_known(job)
    try:
        _refuse_useless_codec(job)
        layout = _best_layout_here(job, wanted, workers) if job.layout.auto and wanted else None
        plan = make_plan(job, this_machine(), workers, layout)
        if before and before.layout == plan.layout:
            plan = plan.model_copy(update={"network": before.network})
        if wanted is None:
            return plan
        here = Here(this_machine())
        here.refuse_if_too_large(wanted, plan.layout, plan.precision)
        predicted = here.predict(wanted, plan.layout, plan.precision)
    except ValueError as error:
        raise LateRefusal(job, str(error)) from error
    if predicted is None:
        return plan
    expected = Predicted(step_seconds=predicted.step, memory=int(float(predicted.memory.total)))
    return plan.model_copy(update={"predicted": expected})


def plan_there(job: Job, machine: Machine, machines: int, workers: int | None) -> Plan:
    """The plan for some machines of one kind. Raises LateRefusal if it cannot be."""
    best = _best_there(job, machine, range(machines, machines + 1)) if job.layout.auto and not workers else None
    whole = replace(
        machine, cores=machine.cores * machines, memory=machine.memory * machines, gpus=machine.gpus * machines
    )
    plan = _make_plan(job, workers, whole, best.layout if best else None)
    if plan.layout.workers % machines:
        raise LateRefusal(job, f"{plan.layout.workers} workers cannot be shared out evenly to {machines} machines")
    words = str(machine) if machines == 1 else f"{machines} × {machine}"
    update: dict[str, Any] = {"machines": machines, "machine": words}
    if best:
        update["predicted"] = Predicted(step_seconds=best.step, memory=int(float(best.memory.total)))
    return plan.model_copy(update=update)


def machines_wanted(job: Job, machine: Machine, free: int) -> int:
    """On how many of so many free machines a job with `layout: auto` is quickest; of unknown ones, on all."""
    best = _best_there(job, machine, range(1, free + 1))
    return best.machines if best else max(1, min(free, job.train.batch // machine.room(job.machines.device)))


def _best_there(job: Job, machine: Machine, counts: range) -> "Prospect | None":
    """The quickest of what is known for some numbers of machines."""
    from slipstream.plan.there import prospects_there

    wanted = _wanted_if_known(job) if machine.gpus and job.machines.device != "cpu" else None
    if wanted is None:
        return None
    found = prospects_there(replace(wanted, quota=counts[-1] * len(machine.gpus)), machine)
    return min((each for each in found if each.machines in counts), key=lambda each: each.step, default=None)


def _wanted_if_known(job: Job) -> "Wanted | None":
    """The job in numbers, where its work is known. It is meant for steps after the warm-up of a codec, because the
    length of the run may not be known."""
    from slipstream.plan.wanted import wanted_of

    work = _work_if_known(job)
    wanted = wanted_of(job, work, job.train.batch) if work else None
    return replace(wanted, agreement=replace(wanted.agreement, plainly=0.0)) if wanted else None


def _work_if_known(job: Job) -> "Work | None":
    """What a step consists of, where that needs neither data nor a built model: a decoder with a known vocabulary."""
    from slipstream.plan.wanted import decoder_of

    vocabulary = getattr(job.model, "vocabulary", None) or getattr(job.data, "vocabulary", None)
    return decoder_of(job, vocabulary) if vocabulary else None


def _best_layout_here(job: Job, wanted: "Wanted", workers: int | None) -> "Layout | None":
    """The quickest layout on this machine; None where nothing is known of its speed."""
    machine = this_machine()
    there = workers or machine.room(job.machines.device)
    found = Here(machine).search(wanted, there, 0.0).prospects
    exact = [each for each in found if workers is None or each.layout.workers == workers]
    return min(exact, key=lambda each: each.seconds).layout if exact else None


def _make_plan(job: Job, workers: int | None, machine: Machine | None = None, layout: Layout | None = None) -> Plan:
    try:
        _refuse_useless_codec(job)
        return make_plan(job, machine or this_machine(), workers, layout)
    except ValueError as error:
        raise LateRefusal(job, str(error)) from error


def _refuse_useless_codec(job: Job, work: "Work | None" = None) -> None:
    """Before machines are rented. What must be built to be looked at, workers look at."""
    if job.exchange.codec and (known := work or _work_if_known(job)):
        refuse(coding_nothing(job.exchange.codec, [(each.n, each.k) for each in known.matrices]))


def read_plan(run: RunFolder) -> Plan | None:
    """The plan of the last launch, if it is there and can be read."""
    try:
        return Plan.model_validate(yaml.safe_load(run.plan.read_text()))
    except (OSError, ValueError, yaml.YAMLError):
        return None


def find_run(name: str | Path) -> RunFolder:
    """A run by its folder, or by its name under `runs`."""
    path = Path(name)
    if not is_run(path) and is_run(RUNS / path):
        path = RUNS / path
    return RunFolder.open(path)


def prepare_data(job: Job, say: Callable[[str], None], home: str) -> None:
    """Make the data of a job ready; the user's own modules are found from `home`."""
    _find_modules_in(home)
    try:
        prepare(job, say)
    except ValueError as error:
        raise LateRefusal(job, str(error)) from error


def _find_modules_in(home: str) -> None:
    """Where the user's own modules are, also for the workers."""
    if home not in sys.path:
        sys.path.insert(0, home)
