"""The text of a source, in pieces small enough to hold, in one order."""

import csv
import gzip
import io
import json
import os
import re
import sys
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from slipstream.data.checks import existing_file, existing_folder, first_line, nearest, need_extra
from slipstream.data.files import File, is_pattern, remote_files
from slipstream.data.storage import is_remote
from slipstream.job.data import TextData

STDLIB = "python-stdlib"
CUTS = 2
"""To be raised when documents are cut in other places."""
_PIECE, _MOST = 1 << 16, 1 << 20
"""Characters: many pieces to spread over the cores, each long enough to be worth a call; and as many as are held for a
place to cut at."""
_CUT = re.compile(r"[^\W_](?= [^\W_])")
"""Between a word and the blank before the next one no tokeniser has a token; beside other characters some do."""
_PACKED = ("", ".gz", ".zst")
_IN_FOLDERS = tuple(f".txt{packed}" for packed in _PACKED)
READABLE = (*_IN_FOLDERS, *(f"{kind}{packed}" for kind in (".jsonl", ".csv") for packed in _PACKED), ".parquet")
"""Names of files that text can be read from."""
_ROWS = 256  # of a table, at a time
_LONGEST = 2**31 - 1  # characters in a field of a table: Python itself would refuse documents
_HALF = re.compile("[\ud800-\udfff]")  # of a pair that stands for one character
_NOT_LIBRARY = {"site-packages", "test", "tests", "idle_test", "__pycache__"}
_BUILD_SPECIFIC = ("config-", "_sysconfigdata")  # they differ between two builds of the same Python


class Piece(NamedTuple):
    """Part of a document."""

    text: str
    ends: bool
    """Whether it is the document's last."""
    begins: bool = True
    """Whether it is its first."""


def find_files(data: TextData) -> Sequence[File]:
    """The files of a source, sorted."""
    if data.source == STDLIB:
        return _stdlib_files()
    source = Path(data.source)
    if is_remote(data.source):
        return _remote_files(data.source)
    if is_pattern(data.source) and not source.exists():
        files = [path for path in named_like(data.source) if path.name.endswith(READABLE)]
        if not files:
            raise ValueError(f"data.source: no file is named like {data.source} (and ends in {', '.join(READABLE)})")
        return files
    if data.source.endswith(READABLE) and not source.is_dir():
        return [existing_file(data.source, "data.source")]
    if source.is_file():
        raise ValueError(f"data.source: the name of {source} ends in none of {', '.join(READABLE)}; no other is read")
    folder = existing_folder(data.source, "data.source")
    found = _of_folder([path for path in sorted(folder.rglob("*")) if path.is_file()])
    if not found:
        raise ValueError(f"data.source: there is no file in {folder} or below it that ends in {', '.join(READABLE)}")
    return found


def _of_folder(files: Sequence[File]) -> Sequence[File]:
    """Those that text is read from: .txt alone where there are any, as others may be there for other reasons."""
    text = [file for file in files if file.name.endswith(_IN_FOLDERS)]
    return text or [file for file in files if file.name.endswith(READABLE)]


def _remote_files(address: str) -> Sequence[File]:
    try:
        found = remote_files(address)
    except ValueError as error:
        raise ValueError(f"data.source: {error}") from None
    named = [file for file in found if file.name.endswith(READABLE)]
    files = named if is_pattern(address) else _of_folder(found)
    if not files:
        raise ValueError(f"data.source: no file of {address} ends in {', '.join(READABLE)}")
    return files


def named_like(pattern: str) -> list[Path]:
    """The files whose names are like this, sorted; or the one that has it."""
    path = Path(pattern)
    if path.exists() or not is_pattern(pattern):
        return [path]
    return sorted(found for found in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if found.is_file())


def split_by_lines(data: TextData) -> bool:
    """Whether each line is a document: in a single .txt file, when documents are not joined."""
    return not data.pack and data.source.endswith(".txt") and Path(data.source).is_file()


def read_pieces(data: TextData, files: Sequence[File]) -> Iterator[Piece]:
    """All text, document after document. Empty documents are left out."""
    for path in files:
        try:
            for document in _documents(data, path):
                yield from cut(document)
        except _damage(path) as error:
            raise ValueError(f"data.source: {path} is cut off or damaged ({error}); copy it again") from None
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


def _documents(data: TextData, path: File) -> Iterator[TextIO]:
    if data.source == STDLIB:
        assert isinstance(path, Path), "Python's library is on this machine"
        yield io.StringIO(path.read_text(encoding="utf-8"))  # whole, so that an undecodable file leaves no part behind
        return
    if path.suffix == ".parquet":
        yield from (io.StringIO(text) for text in _parquet_texts(path, data.field or "text"))
        return
    # The rules of CSV know line ends inside quotes; in all other text they become \n.
    with _opened(path, newline="" if ".csv" in path.suffixes else None) as file:
        if ".jsonl" in path.suffixes:
            yield from _json_texts(file, path, data.field or "text")
        elif ".csv" in path.suffixes:
            yield from _csv_texts(file, path, data.field or "text")
        elif split_by_lines(data):
            yield from (io.StringIO(line.strip()) for line in file)
        else:
            yield file


@contextmanager
def _opened(path: File, newline: str | None) -> Iterator[TextIO]:
    """A file of text, unpacked while it is read."""
    with path.open("rb") as raw:
        unpacked: Any = raw
        if path.suffix == ".gz":
            unpacked = gzip.GzipFile(fileobj=raw)
        elif path.suffix == ".zst":
            unpacked = _zstd(path).ZstdFile(raw)
        with io.TextIOWrapper(unpacked, encoding="utf-8-sig", newline=newline) as text:
            yield text


def _zstd(path: File) -> Any:
    """Not the package zstandard: to it, a file that is cut off has simply ended."""
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise ValueError(f'data.source {path} needs backports.zstd: pip install "slipstream[zst]"') from None
    return zstd


def _damage(path: File) -> tuple[type[Exception], ...]:
    """What is raised while a packed file is read that is not whole."""
    return (EOFError, _zstd(path).ZstdError) if path.suffix == ".zst" else (EOFError, zlib.error, gzip.BadGzipFile)


def _csv_texts(file: TextIO, path: File, field: str) -> Iterator[TextIO]:
    csv.field_size_limit(_LONGEST)
    rows = csv.DictReader(file, strict=True)
    try:
        _check_column(field, list(rows.fieldnames or []), path)
        for row in rows:
            if row[field] is None:
                raise ValueError(f"{path}:{rows.line_num}: has no value in column {field!r}: the row is too short")
            yield io.StringIO(row[field])
    except csv.Error as error:
        raise ValueError(f"{path}:{rows.line_num}: is not valid CSV: {error}; is a quote not closed?") from None


def _parquet_texts(path: File, field: str) -> Iterator[str]:
    need_extra("pyarrow", "pyarrow", "parquet", f"data.source {path}")
    import pyarrow
    from pyarrow import parquet

    try:
        with path.open("rb") as raw, parquet.ParquetFile(raw) as file:
            _check_column(field, file.schema_arrow.names, path)
            for batch in file.iter_batches(batch_size=_ROWS, columns=[field]):
                yield from (text or "" for text in batch.column(0).cast(pyarrow.string()).to_pylist())
    except pyarrow.ArrowException as error:
        raise ValueError(f"data.source: {path} cannot be read as text from parquet: {error}") from None


def _check_column(field: str, names: Sequence[str], path: File) -> None:
    if field not in names:
        hint = nearest(field, names) or f"; it has {', '.join(names)}"
        raise ValueError(
            f"{path}: there is no column {field!r}{hint}; data.field, or --field, says which column holds the text"
        )


def _json_texts(file: TextIO, path: File, field: str) -> Iterator[TextIO]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield io.StringIO(_json_text(line, f"{path}:{number}", field))


def _json_text(line: str, where: str, field: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: is not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # too long a number, too deep a list
        raise ValueError(f"{where}: cannot be read as JSON: {first_line(error)}") from None
    if not isinstance(record, dict):
        raise ValueError(f'{where}: each line must be an object such as {{"{field}": "…"}}')
    if field not in record:
        raise ValueError(
            f"{where}: has no key {field!r}{nearest(field, record)}; data.field says which key holds the text"
        )
    text = record[field]
    if text is None:  # left out, as in tables
        return ""
    if not isinstance(text, str):
        raise ValueError(f"{where}: {field!r} holds {type(text).__name__}, not text")
    if "\\u" in line and (half := _HALF.search(text)):
        raise ValueError(f"{where}: {field!r} holds half a character (\\u{ord(half.group()):04x}), which is not text")
    return text


def cut(document: TextIO) -> Iterator[Piece]:
    """A document in pieces."""
    held, begins = "", True
    while block := document.read(_PIECE):
        held += block
        while len(held) > _PIECE and (end := _place_to_cut(held)):
            yield Piece(held[:end], ends=False, begins=begins)
            held, begins = held[end:], False
    if held:
        yield Piece(held, ends=True, begins=begins)


def _place_to_cut(text: str) -> int | None:
    """None while there may still come one."""
    if found := _CUT.search(text, _PIECE // 2):
        return found.end()
    return _MOST if len(text) >= _MOST else None
