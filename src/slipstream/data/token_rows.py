"""Preparing tokens that the user made: rows of integers in .npy files."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from slipstream.data.arrays import load_array
from slipstream.data.files import stamps
from slipstream.data.holding import Ids
from slipstream.data.making import Making
from slipstream.data.manifest import TOKENIZER, Manifest, checksum
from slipstream.data.tokenizer import ids_of, load_tokenizer
from slipstream.data.writing import write_tokenizer

_BATCH = 4_000_000


class Rows(NamedTuple):
    """One row of tokens to a file; each is a document."""

    files: Sequence[Path]
    ids: Ids
    tokenizer: Path | None

    @property
    def tokens(self) -> int:
        """All of them."""
        return sum(len(load_array(path, "SOURCE")) for path in self.files)


def token_rows(files: Sequence[Path], tokenizer: str | None, vocabulary: int | None) -> Rows:
    """Raises ValueError if these are not tokens, or nothing says how many there are to know."""
    for path in files:
        tokens = load_array(path, "SOURCE")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not len(tokens):
            shape = " × ".join(map(str, tokens.shape))
            raise ValueError(
                f"{path} holds {shape} {tokens.dtype}; tokens are one row of integers, and samples need --targets"
            )
    if (tokenizer is None) == (vocabulary is None):
        raise ValueError("tokens in .npy files need either --vocabulary, the number of token ids, or --tokenizer")
    if tokenizer:
        return Rows(files, ids_of(load_tokenizer(Path(tokenizer), tokenizer)), Path(tokenizer))
    assert vocabulary is not None, "one of them is given"
    if not 1 <= vocabulary <= 2**32:
        raise ValueError(f"--vocabulary is {vocabulary:,}; ids are kept in 32 bits: say 1 to {2**32:,}")
    return Rows(files, Ids(vocabulary, None, None), None)


def prepare_rows(rows: Rows, making: Making) -> Manifest:
    """Make a dataset of these tokens."""
    guard, folder = making.begin(), making.folder
    identity = {
        "rows": stamps(list(rows.files)),
        "vocabulary": rows.ids.vocabulary,
        "tokenizer": rows.tokenizer and checksum(rows.tokenizer),
        "batch": _BATCH,
    }
    writer = making.writer(rows.ids, identity, guard)
    (folder / TOKENIZER).unlink(missing_ok=True)
    if rows.tokenizer:
        write_tokenizer(folder, rows.tokenizer.read_bytes(), guard)
    for tokens, ends in islice(_batches(rows), writer.progress.batches, None):
        writer.add(tokens, ends)
        making.progress(writer.items, writer.items)
    return writer.finish()


def _batches(rows: Rows) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for path in rows.files:
        tokens = load_array(path, "SOURCE")
        for start in range(0, len(tokens), _BATCH):
            part = tokens[start : start + _BATCH]
            _check(part, start, rows.ids.vocabulary, path)
            ends = [len(part)] if start + len(part) == len(tokens) else []
            yield part.astype(rows.ids.dtype), np.array(ends, np.int64)


def _check(tokens: np.ndarray, start: int, vocabulary: int, path: Path) -> None:
    for place in (int(np.argmin(tokens)), int(np.argmax(tokens))):
        if not 0 <= tokens[place] < vocabulary:
            raise ValueError(
                f"{path}: token {start + place:,} is {tokens[place]}, outside 0 to {vocabulary - 1}; correct the file, "
                "or the vocabulary"
            )
