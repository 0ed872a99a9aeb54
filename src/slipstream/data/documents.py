"""The text of a source, in pieces small enough to hold, in one order."""

import io
import json
import os
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from slipstream.data.checks import existing_file, existing_folder, nearest
from slipstream.job.data import TextData

STDLIB = "python-stdlib"
_PIECE = 1 << 16  # characters: many pieces to spread over the cores, each long enough to be worth a call
_CUT = re.compile(r"\S(?=[ \n])")  # byte-level BPE gives a blank to the word after it, so no token spans such a cut
_NOT_LIBRARY = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
_BUILD_SPECIFIC = ("config-", "_sysconfigdata")  # they differ between two builds of the same Python


class Piece(NamedTuple):
    """Part of a document."""

    text: str
    ends: bool
    """Whether it is the document's last."""


def find_files(data: TextData) -> list[Path]:
    """The files of a source, sorted."""
    if data.source == STDLIB:
        return _stdlib_files()
    if data.source.endswith((".txt", ".jsonl")) and not Path(data.source).is_dir():
        return [existing_file(data.source, "data.source")]
    folder = existing_folder(data.source, "data.source")
    files = sorted(path for path in folder.rglob("*.txt") if path.is_file())
    if not files:
        raise ValueError(f"data.source: there is no .txt file in {folder} or below it")
    return files


def split_by_lines(data: TextData) -> bool:
    """Whether each line is a document: in a single .txt file, when documents are not joined."""
    return not data.pack and data.source.endswith(".txt") and Path(data.source).is_file()


def read_pieces(data: TextData, files: Sequence[Path]) -> Iterator[Piece]:
    """All text, document after document. Empty documents are left out."""
    for path in files:
        try:
            for document in _documents(data, path):
                yield from _cut(document)
        except UnicodeDecodeError:
            if data.source != STDLIB:  # its few files in old encodings are left out
                message = f"data.source: {path} is not UTF-8 text; convert it, for example with iconv"
                raise ValueError(message) from None


def _stdlib_files() -> list[Path]:
    files = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = [name for name in folders if name not in _NOT_LIBRARY and not name.startswith(_BUILD_SPECIFIC)]
        files += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(_BUILD_SPECIFIC)]
    return sorted(files)


def _documents(data: TextData, path: Path) -> Iterator[TextIO]:
    if data.source == STDLIB:
        yield io.StringIO(path.read_text(encoding="utf-8"))  # whole, so that an undecodable file leaves no part behind
        return
    with path.open(encoding="utf-8-sig") as file:
        if path.suffix == ".jsonl":
            yield from _json_texts(file, path, data.field or "text")
        elif split_by_lines(data):
            yield from (io.StringIO(line.strip()) for line in file)
        else:
            yield file


def _json_texts(file: TextIO, path: Path, field: str) -> Iterator[TextIO]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield io.StringIO(_json_text(line, f"{path}:{number}", field))


def _json_text(line: str, where: str, field: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not valid JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise ValueError(f'{where}: each line must be an object such as {{"{field}": "…"}}')
    if field not in record:
        raise ValueError(
            f"{where}: has no key {field!r}{nearest(field, record)}; data.field says which key holds the text"
        )
    text = record[field]
    if not isinstance(text, str):
        raise ValueError(f"{where}: {field!r} holds {type(text).__name__}, not text")
    return text


def _cut(document: TextIO) -> Iterator[Piece]:
    held = ""
    while block := document.read(_PIECE):
        held += block
        if len(held) > _PIECE:
            cut = _CUT.search(held, _PIECE // 2)
            end = cut.end() if cut else _PIECE
            yield Piece(held[:end], ends=False)
            held = held[end:]
    if held:
        yield Piece(held, ends=True)
