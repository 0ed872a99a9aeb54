"""A run's checkpoints on disk: which are whole, which are damaged, which may go.

A checkpoint is a folder `step-00000123`. Its manifest, with the size and checksum of every other file, is written
last: a folder without one is unfinished, and one whose files do not match it is damaged. Neither is ever restored.
"""

import hashlib
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slipstream.runs.folder import write_text

MANIFEST = "manifest.json"
STORED = "stored"
"""Beside the checkpoints of a run that is kept in object storage: the newest that is whole there. Later ones must stay
until they are, too."""


@dataclass(frozen=True)
class Progress:
    """How far a run has come. Schedule, data position and random state follow from it and the job's seed."""

    step: int = 0
    samples: int = 0
    skipped: int = 0
    """Updates left out for overflow or a loss that was not finite."""
    scale: float | None = None
    """Loss scale of fp16."""
    good_steps: int = 0
    """Steps since the scale last moved."""
    late: list[int] = field(default_factory=list)
    """Asynchronous: batches before the last that are in no update yet; a resume begins with them."""


def whole_checkpoints(folder: Path) -> list[Path]:
    """The oldest first. One without a manifest is unfinished: the run ended while it was being written."""
    return sorted(path for path in folder.glob("step-*") if (path / MANIFEST).exists())


def find_checkpoint(folder: Path, warn: Callable[[str], None]) -> Path | None:
    """The newest whole checkpoint. Damaged ones are passed over, with a warning that says so."""
    for path in reversed(whole_checkpoints(folder)):
        damage = find_damage(path)
        if damage is None:
            return path
        warn(f"checkpoint {path.name} is damaged ({damage}); going back to the one before it")
    return None


def find_damage(path: Path) -> str | None:
    """What is wrong with a checkpoint, or None."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        for name, expected in manifest["files"].items():
            file = path / name
            if not file.exists():
                return f"{name} is missing"
            if file.stat().st_size != expected["bytes"] or _checksum(file) != expected["sha256"]:
                return f"{name} has changed"
        Progress(**manifest["progress"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its manifest cannot be read: {error}"
    return None


def read_progress(path: Path) -> Progress:
    """How far the run had come when this checkpoint was written."""
    return Progress(**json.loads((path / MANIFEST).read_text())["progress"])


Files = dict[str, dict[str, Any]]
"""Size and checksum of some files of a checkpoint."""


def describe(path: Path, pattern: str) -> Files:
    """The files of a checkpoint whose names are like this."""
    names = sorted(path.glob(pattern))
    with ThreadPoolExecutor() as pool:
        sums = list(pool.map(_checksum, names))
    return {file.name: {"bytes": file.stat().st_size, "sha256": sha} for file, sha in zip(names, sums, strict=True)}


def seal(path: Path, progress: Progress, files: Files) -> None:
    """Write the manifest, which makes the checkpoint a whole one. Its files may be on several machines."""
    write_text(path / MANIFEST, json.dumps({"progress": asdict(progress), "files": files}, indent=1))


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest whole checkpoints, and what unfinished writes left behind."""
    whole = whole_checkpoints(folder)
    stored = folder / STORED
    on_their_way = [path for path in whole if path.name > stored.read_text()] if stored.exists() else []
    for path in set(folder.glob("step-*")) - {*whole[-keep:], *on_their_way}:
        shutil.rmtree(path, ignore_errors=True)


def _checksum(file: Path) -> str:
    with file.open("rb") as data:
        return hashlib.file_digest(data, "sha256").hexdigest()
