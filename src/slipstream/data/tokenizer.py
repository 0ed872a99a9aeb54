"""Text to token ids: the user's tokeniser, or a byte-level BPE trained on the text itself."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from slipstream.data.documents import Piece
from slipstream.data.encoding import Encoder

VOCABULARY = 4096
"""Entries of a tokeniser trained here, unless the job says otherwise."""
_TRAINING_TEXT = 8_000_000  # characters; more text takes longer and hardly changes the merges
_BATCH = 4_000_000  # characters encoded in one call, over all cores
_LONG_WORD = re.compile(r"\S{256}")
_END, _MASK = "<|endoftext|>", "<|mask|>"
_END_NAMES = (_END, "</s>", "[SEP]", "<|end_of_text|>")
_MASK_NAMES = (_MASK, "[MASK]", "<mask>")


@dataclass(frozen=True)
class Ids:
    """What must be known of a tokeniser to use its ids."""

    vocabulary: int
    """One more than the largest id."""
    end_of_text: int | None
    """The id that ends a document."""
    mask: int | None
    """The id that hides a token."""

    @property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every id."""
        return np.dtype(np.uint16 if self.vocabulary <= 2**16 else np.uint32)


def ids_of(tokenizer: Tokenizer) -> Ids:
    def first(names: tuple[str, ...]) -> int | None:
        return next((known[name] for name in names if name in known), None)

    known = tokenizer.get_vocab(with_added_tokens=True)
    return Ids(max(known.values()) + 1, first(_END_NAMES), first(_MASK_NAMES))


def load_tokenizer(path: Path, written: str) -> Tokenizer:
    """`written` is how the user knows the file."""
    return parse_tokenizer(path.read_bytes(), written)


def parse_tokenizer(data: bytes, written: str) -> Tokenizer:
    """The tokeniser of a tokenizer.json."""
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"data.tokenizer: {written} is not a tokenizer.json ({error})") from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None  # the same text must always give the same tokens
    return tokenizer


def train_tokenizer(pieces: Iterable[Piece], size: int | None, vocabulary: int) -> Tokenizer:
    """A byte-level BPE trained on part of the text, of which `size` is the length, where that is known."""
    if vocabulary < 258:
        raise ValueError(f"data.vocabulary is {vocabulary}; it needs 256 bytes, end-of-text and mask: at least 258")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[_END, _MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_thinned(pieces) if size is None else _evenly(pieces, size), trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, pieces: Iterable[Piece], ids: Ids) -> Iterator[tuple[np.ndarray, bool]]:
    """The ids of each piece, and whether a document ends with them."""
    encoder = Encoder(tokenizer)
    for batch in batches(pieces, _BATCH):
        for piece, tokens in zip(batch, encoder.encode(batch), strict=True):
            yield with_end(tokens.astype(ids.dtype), piece, ids), piece.ends


def with_end(tokens: np.ndarray, piece: Piece, ids: Ids) -> np.ndarray:
    """These tokens, and what ends a document if the piece does."""
    return (
        np.append(tokens, tokens.dtype.type(ids.end_of_text)) if piece.ends and ids.end_of_text is not None else tokens
    )


def _evenly(pieces: Iterable[Piece], size: int) -> Iterator[str]:
    share, seen, taken = min(1.0, _TRAINING_TEXT / max(size, 1)), 0, 0
    for piece in pieces:
        seen += len(piece.text)
        if taken < seen * share:
            taken += len(piece.text)
            yield _in_words(piece.text)


def _thinned(pieces: Iterable[Piece]) -> list[str]:
    """Every piece; or every second, fourth, … of them, so that they do not become too many."""
    kept: list[str] = []
    step, size = 1, 0
    for number, piece in enumerate(pieces):
        if number % step == 0:
            kept.append(_in_words(piece.text))
            size += len(piece.text)
        while size > _TRAINING_TEXT and len(kept) > 1:
            kept, step = kept[::2], 2 * step
            size = sum(map(len, kept))
    return kept


def _in_words(text: str) -> str:
    """For training alone: a word of a million letters would take hours."""
    return _LONG_WORD.sub(r"\g<0> ", text)


def batches(pieces: Iterable[Piece], characters: int) -> Iterator[list[Piece]]:
    """Pieces in groups of at least so many characters; the last may have fewer."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= characters:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
