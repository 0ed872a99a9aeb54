"""How tokenised text lies in the cache: `tokens.npy`, `offsets.npy`, `tokenizer.json`, `info.json`."""

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from slipstream.data.documents import read_pieces
from slipstream.data.files import File, size_of
from slipstream.data.tokenizer import VOCABULARY, Ids, encode, ids_of, load_tokenizer, train_tokenizer
from slipstream.job.data import TextData

FORMAT = 2
"""To be raised when the same text would be stored differently."""
Notify = Callable[[str], None]


@dataclass(frozen=True)
class TextInfo(Ids):
    """What is in the store."""

    tokens: int
    documents: int


def build(data: TextData, files: Sequence[File], folder: Path, notify: Notify) -> None:
    """Tokenise the files into the folder."""
    notify(f"reading {plural(len(files), 'file')}")
    own = folder / "tokenizer.json"
    if data.tokenizer:
        shutil.copyfile(data.tokenizer, own)
    else:
        vocabulary = data.vocabulary or VOCABULARY
        notify(f"training a tokeniser of {vocabulary:,} tokens")
        size = sum(map(size_of, files))
        train_tokenizer(read_pieces(data, files), size, vocabulary).save(str(own))
    tokenizer = load_tokenizer(own, data.tokenizer or str(own))
    ids = ids_of(tokenizer)
    with (folder / "tokens.npy").open("wb") as file:
        offsets = _write(file, encode(tokenizer, read_pieces(data, files), ids), ids.dtype)
    np.save(folder / "offsets.npy", offsets)
    info = TextInfo(**asdict(ids), tokens=int(offsets[-1]), documents=len(offsets) - 1)
    (folder / "info.json").write_text(json.dumps(asdict(info), indent=2), encoding="utf-8")
    notify(f"{_short(info.tokens)} tokens of {info.vocabulary:,} kinds, {plural(info.documents, 'document')}")


def read_info(folder: Path) -> TextInfo:
    return TextInfo(**json.loads((folder / "info.json").read_text(encoding="utf-8")))


def read_tokens(folder: Path) -> np.ndarray:
    """All tokens, mapped into memory: ranks of one machine share them."""
    tokens: np.ndarray = np.load(folder / "tokens.npy", mmap_mode="r")
    return tokens.view(np.ndarray)


def read_offsets(folder: Path) -> np.ndarray:
    """Where each document begins, and last where the last one ends."""
    offsets: np.ndarray = np.load(folder / "offsets.npy")
    return offsets


def _write(file: BinaryIO, encoded: Iterable[tuple[np.ndarray, bool]], dtype: np.dtype) -> np.ndarray:
    """Write tokens as they come, so that text larger than memory is no trouble; returns the offsets of documents."""
    _write_header(file, dtype, 0)
    begin, count, offsets = file.tell(), 0, [0]
    for tokens, ends in encoded:
        file.write(tokens.data)
        count += len(tokens)
        if ends:
            offsets.append(count)
    file.seek(0)
    _write_header(file, dtype, count)
    assert file.tell() == begin, "numpy leaves room in the header for the length to grow"
    return np.array(offsets, dtype=np.int64)


def _write_header(file: BinaryIO, dtype: np.dtype, length: int) -> None:
    description = np.lib.format.dtype_to_descr(dtype)
    np.lib.format.write_array_header_1_0(file, {"descr": description, "fortran_order": False, "shape": (length,)})


def _short(count: int) -> str:
    return f"{count / 1e6:,.1f}M" if count >= 1_000_000 else f"{count:,}"


def plural(count: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
