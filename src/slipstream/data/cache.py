"""A folder for what is made once and used often."""

import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path


def build_once(folder: Path, build: Callable[[Path], None]) -> None:
    """Fill the folder, unless it is there. It appears complete or not at all, however many processes try at once."""
    if folder.is_dir():
        return
    draft = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    draft.mkdir(parents=True)
    try:
        build(draft)
        for path in draft.iterdir():
            _to_disk(path)  # or a power cut could leave the name without the contents
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # otherwise another process was first, with the same result
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
