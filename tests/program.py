"""The program as a user runs it: the console script, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).parent
SLIPSTREAM = str(Path(sys.executable).parent / "slipstream")


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "COLUMNS": "120"}


def slipstream(*words: str | Path, cwd: Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [SLIPSTREAM, *map(str, words)], cwd=cwd, env=environment(), capture_output=True, text=True, timeout=timeout
    )


def start(*words: str | Path, cwd: Path) -> subprocess.Popen[str]:
    """Start a command and leave it running."""
    return subprocess.Popen(
        [SLIPSTREAM, *map(str, words)],
        cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


def write_job(folder: Path, values: dict[str, Any], name: str = "job.yaml") -> Path:
    path = folder / name
    path.write_text(yaml.safe_dump(values))
    return path
