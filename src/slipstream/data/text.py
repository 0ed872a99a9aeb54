"""Text becomes tokens once; after that it is read from the cache."""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from slipstream.data.base import Dataset
from slipstream.data.cache import build_once
from slipstream.data.checks import existing_file
from slipstream.data.documents import STDLIB, find_files, split_by_lines
from slipstream.data.files import File, stamps
from slipstream.data.sequences import Documents, pack
from slipstream.data.store import FORMAT, Notify, TextInfo, build, read_info, read_offsets, read_tokens
from slipstream.data.tokenizer import VOCABULARY, Ids
from slipstream.job import Job
from slipstream.job.data import TextData
from slipstream.runs.cache import cache_folder


def check_text(data: TextData) -> None:
    find_files(data)
    if data.tokenizer:
        existing_file(data.tokenizer, "data.tokenizer")


def prepare_text(data: TextData, job: Job, notify: Notify) -> None:
    """Tokenise the source into the cache, if it is not there, and check that the job can use the result."""
    files = find_files(data)
    folder = _folder(data, files)
    build_once(folder, lambda draft: build(data, files, draft, notify))
    _open(folder, data, job)


def open_text(data: TextData, job: Job) -> Dataset:
    return _open(_prepared(data), data, job)


def _open(folder: Path, data: TextData, job: Job) -> Dataset:
    info = read_info(folder)
    if job.task.kind == "masked-token":
        mask_of(info, f"data.tokenizer: {data.tokenizer}")
    tokens = read_tokens(folder)
    if data.pack:
        return pack(tokens, job, data.sequence, info.vocabulary, data.source)
    documents = Documents(tokens, read_offsets(folder), data.sequence, info.vocabulary, pad=info.end_of_text or 0)
    if not len(documents):
        raise ValueError(f"data.source {data.source} has no document of at least two tokens")
    return documents


def text_tokenizer(job: Job) -> Path:
    """The `tokenizer.json` of a job on text that has been prepared."""
    return _prepared(_text(job)) / "tokenizer.json"


def text_info(job: Job) -> TextInfo:
    """Counts and special ids of a job on text that has been prepared."""
    return read_info(_prepared(_text(job)))


def mask_of(ids: Ids, whose: str) -> int:
    """The id that hides a token."""
    if ids.mask is None:
        raise ValueError(
            f"{whose} has no mask token (<|mask|>, [MASK] or <mask>), which train.task masked-token needs; add one to "
            "it, or let one be trained"
        )
    return ids.mask


def _text(job: Job) -> TextData:
    assert isinstance(job.data, TextData), "only text has a tokeniser"
    return job.data


def _prepared(data: TextData) -> Path:
    folder = _folder(data, find_files(data))
    if not folder.is_dir():
        raise ValueError(
            f"data.source {data.source} is not in {folder.parent}, or changed after it was prepared; start again"
        )
    return folder


def _folder(data: TextData, files: Sequence[File]) -> Path:
    """Named after all that determines what is in it."""
    tokenizer = existing_file(data.tokenizer, "data.tokenizer").read_bytes() if data.tokenizer else None
    identity = {
        "format": FORMAT,
        "python": sys.version if data.source == STDLIB else None,
        "files": stamps(files),
        "field": data.field,
        "lines": split_by_lines(data),
        "tokenizer": hashlib.sha256(tokenizer).hexdigest() if tokenizer is not None else None,
        "vocabulary": None if data.tokenizer else data.vocabulary or VOCABULARY,
    }
    return cache_folder() / "text" / hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]
