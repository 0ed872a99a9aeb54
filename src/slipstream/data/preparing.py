"""Preparing text once: tokenised over processes, written in shards. The same sources give the same bytes, however many
processes there are."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError
from tokenizers import Tokenizer

from slipstream.data.documents import Piece, find_files, read_pieces
from slipstream.data.guards import Guard
from slipstream.data.manifest import MANIFEST, TOKENIZER, Manifest
from slipstream.data.sealing import guard_to_write
from slipstream.data.spreading import spread
from slipstream.data.storage import Storage
from slipstream.data.tokenizer import VOCABULARY, Ids, batches, ids_of, parse_tokenizer, train_tokenizer
from slipstream.data.writing import PROGRESS, ShardWriter, refuse_if_prepared, write_tokenizer
from slipstream.job.data import TextData
from slipstream.runs.cache import cache_folder

BATCH = 1_000_000
"""Characters that a process takes at a time."""


class Encoded(NamedTuple):
    """A batch of text as tokens."""

    tokens: np.ndarray
    ends: np.ndarray
    """Places after which a document has ended."""
    characters: int


Progress = Callable[[int, int], None]
"""Told how many characters are done, and how many tokens they made."""


def prepare_text(
    sources: Sequence[TextData],
    folder: Path,
    workers: int,
    shard: int,
    encrypt: bool,
    progress: Progress,
    say: Callable[[str], None],
) -> Manifest:
    """Make a dataset of all text of these sources, in their order; all have the same tokeniser and vocabulary. `shard`
    is the size of a shard in bytes."""
    refuse_if_prepared(folder)
    files = [find_files(source) for source in sources]
    guard = guard_to_write(folder, encrypt)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(sources, files, folder, guard, say)
    ids = ids_of(parse_tokenizer(tokenizer, sources[0].tokenizer or str(folder / TOKENIZER)))
    writer = ShardWriter(folder, ids, {**_identity(sources, files, tokenizer), "shard": shard}, shard, guard=guard)
    if writer.items:
        say(f"going on after {writer.items:,} tokens")
    texts = islice(batches(_pieces(sources, files), BATCH), writer.progress.batches, None)
    done = 0
    for encoded in spread(_encode, texts, workers, _begin, (tokenizer, ids)):
        writer.add(encoded.tokens, encoded.ends)
        done += encoded.characters
        progress(done, writer.items)
    if not writer.items:
        raise ValueError(f"there is no text in {', '.join(source.source for source in sources)}")
    return writer.finish()


def upload(folder: Path, address: str, say: Callable[[str], None]) -> None:
    """Copy a dataset into object storage; the manifest comes last, and makes it a dataset there."""
    storage = Storage(address)
    names = sorted(path.name for path in folder.iterdir() if not path.name.startswith(".") and path.name != MANIFEST)
    for number, name in enumerate([*names, MANIFEST], 1):
        say(f"uploading {number} of {len(names) + 1}: {name}")
        storage.write(name, (folder / name).read_bytes())


def staging_folder(address: str) -> Path:
    """Where a dataset is made that will be uploaded."""
    return cache_folder() / "staging" / hashlib.sha256(address.encode()).hexdigest()[:24]


def text_sources(
    names: Sequence[str], tokenizer: str | None, vocabulary: int | None, field: str | None
) -> list[TextData]:
    """Sources as a job would name them. Raises ValueError."""
    given = {"tokenizer": tokenizer, "vocabulary": vocabulary}
    common = {key: value for key, value in given.items() if value is not None}
    try:
        return [
            TextData.model_validate({"source": name, **common, **({"field": field} if field and "." in name else {})})
            for name in names
        ]
    except ValidationError as error:
        raise ValueError("; ".join(problem["msg"] for problem in error.errors())) from None


def size_of(sources: Sequence[TextData]) -> int:
    """Bytes of all files."""
    return sum(path.stat().st_size for source in sources for path in find_files(source))


def _tokenizer(
    sources: Sequence[TextData], files: Sequence[Sequence[Path]], folder: Path, guard: Guard, say: Callable[[str], None]
) -> bytes:
    own, given = folder / TOKENIZER, sources[0].tokenizer
    if given:
        made = Path(given).read_bytes()
    elif (folder / PROGRESS).exists() and own.exists():  # it is that of the preparation that goes on
        opened = guard.open_file(TOKENIZER, own.read_bytes())
        if opened is None:
            raise ValueError(f"{own} is damaged; remove {folder}, and prepare the dataset again")
        return opened
    else:
        vocabulary = sources[0].vocabulary or VOCABULARY
        say(f"training a tokeniser of {vocabulary:,} tokens")
        size = sum(path.stat().st_size for some in files for path in some)
        made = train_tokenizer(_pieces(sources, files), size, vocabulary).to_str(pretty=True).encode()
    write_tokenizer(folder, made, guard)
    return made


def _identity(sources: Sequence[TextData], files: Sequence[Sequence[Path]], tokenizer: bytes) -> dict[str, Any]:
    """All that determines the tokens."""
    return {
        "sources": [[source.source, source.field] for source in sources],
        "files": [[str(path), path.stat().st_size, path.stat().st_mtime_ns] for some in files for path in some],
        "tokenizer": hashlib.sha256(tokenizer).hexdigest(),
        "batch": BATCH,
    }


def _pieces(sources: Sequence[TextData], files: Sequence[Sequence[Path]]) -> Iterator[Piece]:
    for source, some in zip(sources, files, strict=True):
        yield from read_pieces(source, some)


_worker: tuple[Tokenizer, Ids]


def _begin(tokenizer: bytes, ids: Ids) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core does better than threads
    _worker = parse_tokenizer(tokenizer, TOKENIZER), ids


def _encode(batch: list[Piece]) -> Encoded:
    tokenizer, ids = _worker
    encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
    parts: list[list[int]] = []
    ends, count = [], 0
    for piece, encoding in zip(batch, encodings, strict=True):
        tokens = encoding.ids
        if piece.ends and ids.end_of_text is not None:
            tokens.append(ids.end_of_text)
        parts.append(tokens)
        count += len(tokens)
        if piece.ends:
            ends.append(count)
    tokens_of_all = np.concatenate([np.array(part, ids.dtype) for part in parts])
    return Encoded(tokens_of_all, np.array(ends, np.int64), sum(len(piece.text) for piece in batch))
