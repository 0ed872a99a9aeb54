"""`slipstream plan`: which machines, which layout, what time and cost, before anyone pays."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from slipstream.cli.options import AsJson

if TYPE_CHECKING:
    from slipstream.plan.check import Errors, Score
    from slipstream.plan.choose import Choice
    from slipstream.plan.search import Prospect


def command(
    job: Annotated[str, typer.Argument(metavar="JOB | check", help="The job file; or `check` and tables to score by.")],
    tables: Annotated[list[Path] | None, typer.Argument(metavar="[ROWS.csv]…", help="With check: the tables.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="Override a setting: limits.budget=500.")] = None,
    objective: Annotated[
        Literal["cheapest", "fastest", "pareto"] | None,
        typer.Option(help="Default: cheapest within a deadline, fastest within a budget, else the front of both."),
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How many plans to show.")] = 6,
    here: Annotated[bool, typer.Option("--here", help="Plan for this machine alone.")] = False,
    calibrate: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Correct predictions by a run's measured steps.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Plan A's memory and time, term by term.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw time against cost into FILE.png or FILE.html.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write plan A into FILE.yaml, for `train --plan`.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say which machines to rent for a job, how to split it over them, and what it will take and cost."""
    from slipstream import api

    if job == "check":
        if not tables:
            raise typer.BadParameter("check needs at least one table of published results")
        _show_score(api.check_plans(tables), as_json)
        return
    if tables:
        raise typer.BadParameter("one job at a time")
    if plot and plot.suffix not in (".png", ".html"):
        raise typer.BadParameter(f"--plot {plot}: a picture is a .png or an .html file")
    choice = api.plan(job, settings=settings or [], objective=objective, count=count, here=here, calibrate=calibrate)
    if save:
        api.save_plan(choice, save)
    if plot:
        from slipstream.plan.picture import draw_front

        draw_front(choice, plot)
    if as_json:
        print(json.dumps(_as_json(choice), indent=2))
        return
    _show(choice)
    if explain:
        _explain(choice.plans[0])
    for what, path in (("plan A", save), ("the picture", plot)):
        if path:
            print(f"{what} is in {path}")


def _show(choice: "Choice") -> None:
    from rich.console import Console
    from rich.table import Table

    from slipstream.plan.choose import duration, money

    console = Console(highlight=False)
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    shown = [name for name, least in _COLUMNS.items() if console.width >= least]
    for name in shown:
        table.add_column(name, justify="left" if name in ("plan", "accelerators") else "right", no_wrap=True)
    for number, plan in enumerate(choice.plans):
        what = f"{plan.accelerators:,} × {plan.offer.accelerator.name}{' spot' if plan.spot else ''}"
        cells = (
            _letter(number), what, f"{plan.step:.3g} s",
            f"{plan.memory.total / 1e9:.0f}/{plan.offer.accelerator.memory / 1e9:.0f} GB", f"{plan.utilisation:.0%}",
            duration(plan.seconds), money(plan.cost), f"±{choice.sure:.0%}",
        )  # fmt: skip
        table.add_row(*(cell for name, cell in zip(_COLUMNS, cells, strict=True) if name in shown))
    console.print(table)
    for number, plan in enumerate(choice.plans):
        console.print(f"{_letter(number)}: {_machines(plan)}; {plan.layout}")
    if exchange := str(choice.wanted.agreement):
        console.print(f"exchange: {exchange}")
    for line in choice.why_not:
        console.print(f"why not {line}", style="dim")
    for line in choice.hints:
        console.print(line)
    if choice.stale:
        console.print(choice.stale, style="yellow")


_COLUMNS = {"plan": 0, "accelerators": 0, "step": 70, "memory": 64, "busy": 80, "ends in": 0, "cost": 0, "sure": 56}
"""How wide a screen must be for a column to be shown."""


def _letter(number: int) -> str:
    return chr(ord("A") + number) if number < 26 else str(number + 1)


def _machines(plan: "Prospect") -> str:
    offer = plan.offer
    if not offer.machine:  # the one that we are on
        return offer.cloud
    return f"{plan.machines:,} × {offer.cloud} {offer.machine}{' spot' if plan.spot else ''} in {offer.region}"


def _explain(plan: "Prospect") -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for title, terms, scale, unit in (
        ("memory of the busiest worker", plan.memory, 1e9, "GB"),
        ("time of a step", plan.times, 1.0, "s"),
    ):
        console.print(f"\n{title}: {float(terms.total) / scale:.3g} {unit}", style="bold")
        for name, value in vars(terms).items():
            part = float(value) / float(terms.total)
            if part >= 0.001:
                console.print(f"  {name:12} {float(value) / scale:10.3g} {unit}  {'█' * max(1, round(40 * part))}")
    every = plan.waste.interval
    console.print(
        f"\nfailures and checkpoints take {plan.waste.part:.1%} of the time, with a checkpoint every "
        f"{every / 60:.0f} min; machines ${plan.bill.machines:,.2f}, storage ${plan.bill.storage:,.2f}, "
        f"the model's way out ${plan.bill.egress:,.2f}"
    )


def _as_json(choice: "Choice") -> dict[str, Any]:
    from slipstream.plan.choose import as_values

    return {
        "objective": choice.objective,
        "plans": [as_values(plan, choice.sure, choice.wanted.agreement) for plan in choice.plans],
        "why_not": choice.why_not,
        "hints": choice.hints,
        "stale": choice.stale,
        "evaluated": choice.evaluated,
    }


def _show_score(score: "Score", as_json: bool) -> None:
    from dataclasses import asdict

    if as_json:
        print(json.dumps(asdict(score), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(f"{score.rows} rows used")
    for why, count in sorted(score.left_out.items(), key=lambda item: -item[1]):
        console.print(f"{count} rows left out: {why}", style="dim")
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name in ("error", "rows", "median", "mean", "9 in 10 within"):
        table.add_column(name, justify="left" if name == "error" else "right")
    rows: list[tuple[str, Errors | None]] = [
        ("step time", score.time),
        ("step time, one factor for each source", score.time_scaled),
        ("memory", score.memory),
        ("regret of the layout chosen", score.regret),
        *((f"  step time, {source}", errors) for source, errors in score.by_source.items()),
    ]
    for name, errors in rows:
        if errors:
            table.add_row(name, f"{errors.rows:,}", f"{errors.median:.1%}", f"{errors.mean:.1%}", f"{errors.most:.1%}")
    console.print(table)
    console.print(f"{score.wrong_verdicts} of {score.ran} rows that ran would have been refused for memory")
