"""The user's own code, which travels with a run: what is changed later does not change a run that waits in a queue."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from slipstream.runs import RunError

_LARGEST, _MOST = 10 * 2**20, 200 * 2**20
"""Bytes of a file and of all together: code is small, and data does not travel this way."""
_LEFT = {"runs", "node_modules", "__pycache__", "site-packages"}


def pack(home: Path, into: Path) -> None:
    """Copy the files of a folder, without data, environments, hidden ones and earlier runs."""
    size = 0
    for file in _files(home):
        size += file.stat().st_size
        if size > _MOST:
            raise RunError(
                f"{home} holds more than {_MOST >> 20} MB beside large files, and all of it would travel with the job; "
                "submit from the folder that has your code alone"
            )
        place = into / file.relative_to(home)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, place)


def _files(home: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(home):
        below[:] = sorted(
            name
            for name in below
            if not name.startswith(".") and name not in _LEFT and not (Path(folder) / name / "pyvenv.cfg").exists()
        )
        for name in sorted(names):
            file = Path(folder) / name
            if not name.startswith(".") and file.is_file() and file.stat().st_size <= _LARGEST:
                yield file
