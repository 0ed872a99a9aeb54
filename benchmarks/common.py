"""What the benchmarks share: machine facts, alternating rounds, processes in a row, tables and JSON."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from memory import Peak
from slipstream.plan import this_machine

RESULTS = Path(__file__).parent / "results"
SLIPSTREAM = str(Path(sys.executable).parent / "slipstream")
console = Console(highlight=False)
T = TypeVar("T")


def facts(*packages: str) -> dict[str, Any]:
    """When, where and with what: without these a figure means nothing. A `load` above 0.5: others computed too."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": str(this_machine()),
        "cores": this_machine().cores,
        "load": round(os.getloadavg()[0], 2),
        "versions": {name: installed(name) for name in ("slipstream", "torch", *packages)},
    }


class Stolen:
    """The processors' time that other machines on the same host take: where it is more than a few hundredths, figures
    mean little."""

    def __init__(self) -> None:
        self._before = self._ticks()

    @property
    def part(self) -> float:
        """Of the time since this was made; 0 where the system does not say."""
        spent = [now - before for before, now in zip(self._before, self._ticks(), strict=True)]
        return round(spent[-1] / max(1, sum(spent)), 3)

    @staticmethod
    def _ticks() -> list[int]:
        stat = Path("/proc/stat")
        return [int(each) for each in stat.read_text().split()[1:9]] if stat.exists() else [0]


def installed(package: str) -> str | None:
    """The version of a package, if it is there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def alternate(sides: Sequence[T], rounds: int) -> Iterator[T]:
    """A B C, then C B A, and so on: what drifts while a benchmark runs falls on all sides alike."""
    for number in range(rounds):
        yield from sides if number % 2 == 0 else reversed(sides)


def run_all(
    commands: list[list[str]],
    environments: list[dict[str, str]],
    log: Path,
    timeout: float = 600,
    peak: Peak | None = None,
) -> None:
    """Run processes side by side to their end; what they say goes to a file and is shown if one of them fails. Of the
    first, memory is watched where that is asked for."""
    with log.open("wb") as file:
        processes = [
            subprocess.Popen(command, env={**os.environ, **environment}, stdout=file, stderr=subprocess.STDOUT)
            for command, environment in zip(commands, environments, strict=True)
        ]
        if peak:
            peak.watch(processes[0].pid)
        try:
            codes = [process.wait(timeout) for process in processes]
        finally:
            for process in processes:
                process.kill()
            if peak:
                peak.end()
    if any(codes):
        raise SystemExit(f"{' '.join(commands[0])} failed with {codes}:\n{log.read_text()[-4000:]}")


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: words to the left, figures to the right."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2))
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def save(path: Path, record: dict[str, Any]) -> None:
    """Write a benchmark's record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"written to {path}", style="dim")
