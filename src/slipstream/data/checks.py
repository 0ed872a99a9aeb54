"""What all sources check in the same way, with errors that say where to look and what to do."""

import difflib
import importlib.util
from collections.abc import Iterable
from pathlib import Path


def nearest(word: str, valid: Iterable[str]) -> str:
    """` (did you mean 'x'?)`, or nothing when no valid name is near."""
    near = difflib.get_close_matches(word, list(valid), n=1, cutoff=0.55)
    return f" (did you mean {near[0]!r}?)" if near else ""


def existing_file(path: str, setting: str) -> Path:
    """The path as an existing file; `setting` is where the user wrote it."""
    found = _existing(path, setting)
    if not found.is_file():
        raise ValueError(f"{setting}: {found} is a folder; give the path of a file")
    return found


def existing_folder(path: str, setting: str) -> Path:
    """The path as an existing folder."""
    found = _existing(path, setting)
    if not found.is_dir():
        raise ValueError(f"{setting}: {found} is a file; give the path of a folder")
    return found


def _existing(path: str, setting: str) -> Path:
    found = Path(path)
    if found.exists():
        return found
    if not found.parent.is_dir():
        raise ValueError(f"{setting}: there is no {found}, nor a folder {found.parent}")
    hint = nearest(found.name, (beside.name for beside in found.parent.iterdir()))
    raise ValueError(f"{setting}: there is no {found.name} in {found.parent}{hint}")


def need_extra(module: str, package: str, extra: str, user: str) -> None:
    """An optional package must be there; looked up without importing it, which can take seconds."""
    if importlib.util.find_spec(module) is None:
        raise ValueError(f'{user} needs {package}: pip install "slipstream[{extra}]"')


def first_line(error: Exception, text: str | None = None) -> str:
    """Of what a library says, which may be followed by its inner life."""
    lines = (line.strip() for line in (text or str(error)).splitlines())
    return next(filter(None, lines), type(error).__name__)
