"""Copies of remote sources that are read out of order: arrays and images. Text is read where it is."""

import hashlib
import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from slipstream.data.documents import READABLE
from slipstream.data.files import RemoteFile, is_pattern, remote_files, stamps
from slipstream.data.storage import is_remote
from slipstream.runs.cache import cache_folder

_AT_ONCE = 8


def here(name: str) -> tuple[list[str], Path | None]:
    """A source as names on this machine, and the folder of copies that were made for it, if any. Raises ValueError."""
    if not is_remote(name) or name.endswith(READABLE):
        return [name], None
    files = remote_files(name)
    text = [file for file in files if file.name.endswith(READABLE)]
    if text:
        return [name], None
    folder = _copies(name, files)
    if is_pattern(name) or name.endswith(".npy"):
        return [str(folder / file.key) for file in files], folder
    return [str(folder)], folder


def _copies(address: str, files: Sequence[RemoteFile]) -> Path:
    identity = json.dumps([address, stamps(files)])
    folder = cache_folder() / "fetched" / hashlib.sha256(identity.encode()).hexdigest()[:24]
    missing = [file for file in files if not (folder / file.key).exists()]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for _ in pool.map(lambda file: _copy(file, folder / file.key), missing):
            pass
    return folder


def _copy(file: RemoteFile, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    with file.open() as source, draft.open("wb") as target:
        shutil.copyfileobj(source, target, 2**23)
    draft.rename(path)
