"""`slipstream jobs`: what was sent to fleets, and how it stands."""

import json
import time
from pathlib import Path
from typing import Any

from slipstream.cli.options import AsJson


def command(as_json: AsJson = False) -> None:
    """List what was submitted."""
    from slipstream.submissions import submitted

    rows = [_row(run, record) for run, record in submitted()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    if not rows:
        print("nothing was submitted yet; `slipstream submit JOB --on local` does it")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in ("run", "on", "workers", "status", "step", "loss", "sent"):
        table.add_column(column, justify="right" if column in ("step", "loss") else "left", no_wrap=column != "status")
    for row in rows:
        several = f" on {row['machines']} machines" if row["machines"] > 1 else ""
        loss = "" if row["loss"] is None else f"{row['loss']:.4f}"
        sent = time.strftime("%d %b %H:%M", time.localtime(row["time"]))
        name = Path(row["run"]).name
        table.add_row(name, row["fleet"], f"{row['workers']}{several}", row["status"], f"{row['step']:,}", loss, sent)
    Console().print(table)


def _row(run: Any, record: Any) -> dict[str, Any]:
    from slipstream.cli.summary import summarise
    from slipstream.data.storage import StorageGone
    from slipstream.submissions import refresh, standing_of

    summary = summarise(run)
    if summary["status"] != "finished":
        try:
            summary = summarise(refresh(run))
            summary["status"] = standing_of(run, summary["status"])
        except StorageGone as error:
            summary["status"] = f"unknown: {error}"
    facts = {"fleet": record.fleet, "id": record.id, "machines": record.machines, "workers": record.workers}
    return {**summary, **facts, "time": record.time}
