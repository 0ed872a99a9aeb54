"""Asking after runs on fleets, as their tests do."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from program import SLIPSTREAM, environment, slipstream


def until(condition: Callable[[], Any], patience: float = 60.0) -> None:
    """Wait for something to come true."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.05)


def processes_of(folder: Path) -> dict[int, str]:
    """Those that have this folder in their command line or work in it, but for this one."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            where = str((process / "cwd").readlink())
        except OSError:  # it has ended
            continue
        if int(process.name) != os.getpid() and (str(folder) in words or where.startswith(str(folder))):
            found[int(process.name)] = words
    return found


def steps_of(run: Path) -> int:
    """How far it has come."""
    file = run / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def losses(run: Path) -> list[float]:
    """The curve."""
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def jobs(folder: Path) -> dict[str, dict[str, Any]]:
    """What `slipstream jobs` lists."""
    listed = slipstream("jobs", "--json", cwd=folder)
    assert listed.returncode == 0, listed.stderr
    return {Path(row["run"]).name: row for row in json.loads(listed.stdout)}


def agent_of(run: Path) -> int:
    """The process of a run on this machine."""
    return int(json.loads((run / "submission.json").read_text())["id"].partition("@")[0])


@contextmanager
def both_agents(run: str, folder: Path, logs: Path, **told: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Those of a run's two machines, the head first. What they are told may have the machine's number in it: `{}`."""
    found = []
    for machine in (0, 1):
        own = {name: value.format(machine) for name, value in told.items()}
        known = {"SLIPSTREAM_MACHINE": str(machine), "SLIPSTREAM_ADDRESS": "127.0.0.1", **own}
        log = (logs / f"agent-{machine}").open("a")
        command, together = [SLIPSTREAM, "agent", run], environment() | known
        found.append(subprocess.Popen(command, env=together, cwd=folder, stdout=log, stderr=log, text=True))
    try:
        yield found
    finally:
        for agent in found:
            agent.kill()
            agent.wait()
