"""`slipstream show`: one run, its plan, its course and what came of it."""

import json
from dataclasses import asdict
from typing import Any

from slipstream.cli.options import AsJson, RunArgument


def command(run: RunArgument, as_json: AsJson = False) -> None:
    """Show one run."""
    from slipstream.api import find_run, read_plan
    from slipstream.cli.summary import summarise
    from slipstream.job import load_job
    from slipstream.runs import draw_curve, read_lines
    from slipstream.runs.result import read_result
    from slipstream.submissions import refresh

    folder = refresh(find_run(run))
    summary, result, plan = summarise(folder), read_result(folder), read_plan(folder)
    events = list(read_lines(folder.events))
    if as_json:
        detail = {"plan": plan and plan.model_dump(mode="json"), "result": result and asdict(result), "events": events}
        print(json.dumps({**summary, **detail}, indent=2))
        return
    from rich.console import Console

    from slipstream.cli.screen import plan_table, show_result

    console = Console(highlight=False)
    if plan:
        console.print(plan_table(folder, load_job(folder.job), plan))
    _print_course(console, list(read_lines(folder.metrics)))
    if result:
        show_result(console, folder, result)
    else:
        console.print(f"{summary['status']} after step {summary['step']:,}")
    if summary["status"] in ("stopped", "failed", "killed"):
        console.print(f"  slipstream resume {folder.path}", markup=False)
    if curve := draw_curve(folder):
        console.print(f"curve: {curve}", markup=False)


def _print_course(console: Any, lines: list[dict[str, Any]]) -> None:
    """About ten lines of the curve."""
    from slipstream.cli.screen import number

    every = max(1, len(lines) // 10)
    for line in lines[every - 1 :: every]:
        judged = f"   validation {number(line['val_loss'])}" if "val_loss" in line else ""
        console.print(f"  step {line['step']:>6,}   loss {number(line['loss'])}   lr {line['lr']:.2e}{judged}")
