"""`slipstream probe`: measure this machine, for later plans."""

import json
import sys
from dataclasses import asdict

from slipstream.cli.options import AsJson


def command(as_json: AsJson = False) -> None:
    """Measure this machine for a minute or two: matrices, memory, exchange, and training steps of our own."""
    from slipstream.plan import this_machine
    from slipstream.plan.profile import save_profile
    from slipstream.probe import probe

    profile = probe(lambda text: print(f"  {text} …", file=sys.stderr, flush=True))
    path = save_profile(profile, this_machine())
    if as_json:
        print(json.dumps(asdict(profile), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    what = "threads" if profile.device == "cpu" else ""
    for name, rate in profile.peaks.items():
        table.add_row(f"matrix products, {name} {what}".strip(), f"{rate / 1e12:,.3g} TFLOP/s")
    table.add_row("memory, read and written", f"{profile.bandwidth / 1e9:,.3g} GB/s")
    table.add_row("the smallest operation", f"{profile.operation * 1e6:,.3g} µs")
    least = f"at least {profile.latency * 1e6:,.0f} µs"
    table.add_row("all-reduce of two workers", f"{profile.link / 1e9:,.3g} GB/s, {least}")
    console.print(profile.machine, style="bold")
    console.print(table)
    steps = Table("training step", "measured", "as fitted", box=None, header_style="bold", padding=(0, 2, 0, 0))
    for name, took, given in profile.steps:
        steps.add_row(name, f"{took * 1e3:,.1f} ms", f"{given * 1e3:,.1f} ms")
    console.print(steps)
    console.print(f"kept in {path}; plans for this machine use it", style="dim")
