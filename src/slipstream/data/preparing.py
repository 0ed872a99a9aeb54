"""Preparing text once: tokenised over processes, written in shards. The same sources give the same bytes, however many
processes there are."""

import hashlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from slipstream.data.destinations import PROGRESS
from slipstream.data.documents import CUTS, STDLIB, Piece, find_files, read_pieces
from slipstream.data.encoding import Encoder
from slipstream.data.files import File, stamps
from slipstream.data.files import size_of as bytes_of
from slipstream.data.guards import Guard
from slipstream.data.making import Making
from slipstream.data.manifest import TOKENIZER, Manifest
from slipstream.data.queries import Query, check_query, is_address, make_query, read_rows
from slipstream.data.spreading import spread
from slipstream.data.tokenizer import VOCABULARY, Ids, batches, ids_of, parse_tokenizer, train_tokenizer, with_end
from slipstream.data.writing import ShardWriter, write_tokenizer
from slipstream.job.data import TextData

BATCH = 250_000
"""Characters that a process takes at a time."""


class Encoded(NamedTuple):
    """A batch of text as tokens."""

    tokens: np.ndarray
    ends: np.ndarray
    """Places after which a document has ended."""
    characters: int


Source = TextData | Query


def prepare_text(sources: Sequence[Source], making: Making) -> Manifest:
    """Make a dataset of all text of these sources, in their order; all have the same tokeniser and vocabulary."""
    making.dest.refuse_if_prepared()  # before a database is asked
    files = [_find_files(source) for source in sources]
    for source in sources:
        if isinstance(source, Query):
            check_query(source, making.say)
    guard, folder = making.begin(), making.folder
    tokenizer = _tokenizer(sources, files, folder, guard, making.say)
    ids = ids_of(parse_tokenizer(tokenizer, sources[0].tokenizer or str(folder / TOKENIZER)))
    writer = making.writer(ids, _identity(sources, files, tokenizer), guard)
    hashes: deque[str] = deque()
    texts = _to_do(batches(_pieces(sources, files), BATCH), writer, folder, hashes)
    done = 0
    for encoded in spread(_encode, texts, making.workers, _begin, (tokenizer, ids)):
        writer.add(encoded.tokens, encoded.ends, hashes.popleft())
        done += encoded.characters
        making.progress(done, writer.items)
    if not writer.items:
        raise ValueError(f"there is no text in {', '.join(source.source for source in sources)}")
    return writer.finish()


def text_sources(
    names: Sequence[str], tokenizer: str | None, vocabulary: int | None, field: str | None, query: str | None = None
) -> list[Source]:
    """Sources as a job would name them, and databases, which all get the same query. Raises ValueError."""
    given = {"tokenizer": tokenizer, "vocabulary": vocabulary}
    common = {key: value for key, value in given.items() if value is not None}
    if query and not any(map(is_address, names)):
        raise ValueError("--query needs an address among the sources, such as postgresql://user@host/database")

    def source(name: str) -> Source:
        if not is_address(name):
            return TextData.model_validate(
                {"source": name, **common, **({"field": field} if field and "." in name else {})}
            )
        made = make_query(name, query or "", field, TextData.model_validate({"source": STDLIB, **common}))
        if not query:
            raise ValueError(f'{made.source} needs a query: --query "SELECT body FROM articles ORDER BY id"')
        return made

    try:
        return [source(name) for name in names]
    except ValidationError as error:
        raise ValueError(
            "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
        ) from None


def size_of(sources: Sequence[Source]) -> int | None:
    """Bytes of all files; None where a database is among the sources."""
    if any(isinstance(source, Query) for source in sources):
        return None
    return sum(bytes_of(path) for source in sources for path in _find_files(source))


def _find_files(source: Source) -> Sequence[File]:
    return [] if isinstance(source, Query) else find_files(source)


def _tokenizer(
    sources: Sequence[Source], files: Sequence[Sequence[File]], folder: Path, guard: Guard, say: Callable[[str], None]
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
        made = train_tokenizer(_pieces(sources, files), size_of(sources), vocabulary).to_str(pretty=True).encode()
    write_tokenizer(folder, made, guard)
    return made


def _identity(sources: Sequence[Source], files: Sequence[Sequence[File]], tokenizer: bytes) -> dict[str, Any]:
    """All that determines the tokens."""
    return {
        "sources": [[source.source, source.field, getattr(source, "sql", None)] for source in sources],
        "files": stamps([path for some in files for path in some]),
        "tokenizer": hashlib.sha256(tokenizer).hexdigest(),
        "batch": BATCH,
        "cuts": CUTS,
    }


def _pieces(sources: Sequence[Source], files: Sequence[Sequence[File]]) -> Iterator[Piece]:
    for source, some in zip(sources, files, strict=True):
        yield from read_rows(source) if isinstance(source, Query) else read_pieces(source, some)


def _to_do(
    texts: Iterable[list[Piece]], writer: ShardWriter, folder: Path, hashes: "deque[str]"
) -> Iterator[list[Piece]]:
    """The batches that are not done. Those that are, are read again, and must be what they were. `hashes` gets the
    hash of all text up to the end of each."""
    done, seen = writer.progress, hashlib.sha256()
    checked = not done.shards
    for number, batch in enumerate(texts):
        for piece in batch:
            seen.update(piece.text.encode("utf-8", "surrogatepass") + (b"\xff" if piece.ends else b""))
        if number < done.batches:
            continue
        if not checked and seen.hexdigest() != done.text:
            break
        checked = True
        hashes.append(seen.hexdigest())
        yield batch
    if not checked:
        raise ValueError(
            f"the text of which {folder} holds a part has changed, or comes in another order; remove {folder} to begin "
            "anew (the rows of a query keep their order if it ends in ORDER BY and a column without equal values)"
        )


_worker: tuple[Encoder, Ids]


def _begin(tokenizer: bytes, ids: Ids) -> None:
    global _worker
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a process for each core does better than threads
    _worker = Encoder(parse_tokenizer(tokenizer, TOKENIZER)), ids


def _encode(batch: list[Piece]) -> Encoded:
    encoder, ids = _worker
    tokens = encoder.encode(batch)
    parts = [with_end(part, piece, ids) for part, piece in zip(tokens, batch, strict=True)]
    places = np.cumsum([len(part) for part in parts])
    ends = places[[piece.ends for piece in batch]]
    return Encoded(np.concatenate(parts).astype(ids.dtype), ends, sum(len(piece.text) for piece in batch))
