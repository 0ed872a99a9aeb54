"""Text as the ids of its tokens, by the quickest library that gives those which `tokenizers` gives."""

import json
from collections.abc import Sequence
from itertools import count
from typing import Any, Protocol

import numpy as np
from tokenizers import Tokenizer

from slipstream.data.documents import Piece

_EVERY, _SAMPLE = 64, 10_000
"""Calls of which one is checked, and characters of it: a hundredth of the time."""
_ODD = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_FORMS = ("NFC", "NFD", "NFKC", "NFKD")


class Quick(Protocol):
    """What gigatoken (extra [tokens]) is to us: byte-level BPE in a fiftieth of the time."""

    def encode(self, text: str) -> np.ndarray: ...


class Encoder:
    """Which library encodes never shows in the result: `tokenizers` is right, and the other is compared with it while
    it works."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._right = tokenizer
        settings = json.loads(tokenizer.to_str())
        self._quick = quick_of(settings)
        self._any_text = settings["normalizer"] is None
        self._prepends = '"Prepend"' in json.dumps(settings["normalizer"])
        self._calls = count()

    def encode(self, pieces: Sequence[Piece]) -> list[np.ndarray]:
        """The ids of each piece, without those that a template puts around it."""
        texts = [piece.text if piece.begins else self._continued(piece.text) for piece in pieces]
        if self._quick is None:
            return self._slowly(texts)
        if texts and next(self._calls) % _EVERY == 0:
            self._compare(self._quick, texts[0][:_SAMPLE])
        found = [self._quick.encode(text) if self._any_text or text.isascii() else None for text in texts]
        others = iter(self._slowly([text for text, ids in zip(texts, found, strict=True) if ids is None]))
        return [next(others) if ids is None else ids for ids in found]

    def _continued(self, text: str) -> str:
        """A normaliser that prepends a blank to every text gives back the one which is taken away here."""
        return text.removeprefix(" ") if self._prepends else text

    def _slowly(self, texts: Sequence[str]) -> list[np.ndarray]:
        encodings = self._right.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def _compare(self, quick: Quick, text: str) -> None:
        if (self._any_text or text.isascii()) and not np.array_equal(quick.encode(text), self._slowly([text])[0]):
            raise ValueError(
                "gigatoken and tokenizers give different tokens for a text of this data; run `pip uninstall gigatoken` "
                f"and prepare the data anew. The text begins with {text[:40]!r}"
            )


def quick_of(settings: dict[str, Any]) -> Quick | None:
    """None where gigatoken is not there, cannot do it, or would do it otherwise: it does not know of conditions of
    added tokens, and its Unicode, of which normal forms are a part, may be a newer one; ASCII has but one form."""
    model, normalizer = settings["model"], settings["normalizer"]
    if model["type"] != "BPE" or any(model.get(setting) for setting in _ODD):
        return None
    if normalizer is not None and normalizer["type"] not in _FORMS:
        return None
    if any(token[condition] for token in settings["added_tokens"] for condition in ("single_word", "lstrip", "rstrip")):
        return None
    try:
        from gigatoken import Tokenizer as GigaTokenizer

        quick: Quick = GigaTokenizer.from_json(json.dumps(settings))
        return quick
    except (ImportError, RuntimeError):  # RuntimeError: what it does not know
        return None
