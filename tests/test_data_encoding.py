"""The quick way to tokenise gives what the library `tokenizers` gives, or is not taken."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from slipstream.data import documents
from slipstream.data.documents import Piece
from slipstream.data.encoding import Encoder, quick_of
from slipstream.data.tokenizer import parse_tokenizer

LLAMA = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
TEXTS = [Path(json.__file__).read_text(), "naïve café, 東京 — « Ωμέγα » 12345 ½ don't I'LL\r\n\t" * 20]
SURROGATES = range(0xD800, 0xE000)
pieces = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["  ", "\r\n", "\n\n", "'s", "'LL", "'ſ", "12345", "<|endoftext|>", "<|end", "e\u0301", "é", "\u00a0", "👩‍👧"]
    ),
)
some_text = st.lists(pieces, max_size=30).map("".join).filter(lambda text: not set(map(ord, text)) & set(SURROGATES))


def byte_level() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def split(pattern: str) -> Any:
    bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_alone])


def trained(words: Any, normalizer: Any = None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.normalizer = words, normalizer
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def with_template() -> Tokenizer:
    tokenizer = trained(byte_level())
    tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    return tokenizer


QUICK = {
    "gpt2": trained(byte_level()),
    "llama": trained(split(LLAMA)),
    "qwen": trained(split(LLAMA.replace("{1,3}", "")), normalizers.NFC()),
    "template": with_template(),
}


def right(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def encoded(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    return [ids.tolist() for ids in Encoder(tokenizer).encode([Piece(text, ends=True) for text in texts])]


def changed(tokenizer: Tokenizer, change: Any) -> Tokenizer:
    values = json.loads(tokenizer.to_str())
    change(values)
    return Tokenizer.from_str(json.dumps(values))


@pytest.mark.parametrize("name", QUICK)
@settings(max_examples=150)
@given(texts=st.lists(some_text, max_size=3))
def test_the_same_tokens(name: str, texts: list[str]) -> None:
    tokenizer = QUICK[name]
    assert encoded(tokenizer, texts) == [right(tokenizer, text) for text in texts]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_the_same_tokens_of_every_character(name: str) -> None:
    """Both libraries know the same Unicode: a newer one of either may change that."""
    texts = [
        "".join(f"a{character}1{character} {character}\n" for character in map(chr, range(begin, begin + 0x400)))
        for begin in range(0, 0x110000, 0x400)
        if begin not in SURROGATES
    ]
    expected = QUICK[name].encode_batch_fast(texts, add_special_tokens=False)
    assert encoded(QUICK[name], texts) == [encoding.ids for encoding in expected]


@pytest.mark.parametrize("name", QUICK)
def test_the_quick_way_is_taken(name: str) -> None:
    assert quick_of(json.loads(QUICK[name].to_str())) is not None


def test_the_quick_way_is_not_taken_where_it_would_differ() -> None:
    def refused(change: Any) -> bool:
        return quick_of(json.loads(changed(QUICK["gpt2"], change).to_str())) is None

    assert refused(lambda values: values["model"].update(dropout=0.5))
    assert refused(lambda values: values.update(normalizer={"type": "Lowercase"}))
    assert refused(lambda values: values.update(pre_tokenizer={"type": "Whitespace"}))
    assert refused(lambda values: values["added_tokens"][0].update(single_word=True))
    assert quick_of(json.loads(Tokenizer(models.WordPiece(unk_token="[UNK]")).to_str())) is None
    assert quick_of(json.loads(Tokenizer(models.Unigram()).to_str())) is None


@settings(max_examples=50)
@given(text=some_text)
def test_conditions_of_added_tokens_hold(text: str) -> None:
    tokenizer = trained(byte_level())
    tokenizer.add_tokens([AddedToken("def", single_word=True), AddedToken(" im", lstrip=True)])
    for whole in (text, f"{text} im def {text}", "undefined  im"):
        assert encoded(tokenizer, [whole]) == [right(tokenizer, whole)]


def test_a_library_that_gives_other_tokens_ends_the_preparation() -> None:
    class Other:
        def encode(self, text: str) -> np.ndarray:
            return np.zeros(len(text), np.uint32)

    encoder = Encoder(QUICK["gpt2"])
    encoder._quick = Other()
    with pytest.raises(ValueError, match="pip uninstall gigatoken"):
        encoder.encode([Piece("some text", ends=True)])


def prepending() -> Tokenizer:
    """As Llama 2: a blank before every text, and blanks are a letter of their own."""
    tokenizer = trained(None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]))
    return changed(
        tokenizer, lambda values: values["model"].update(merges=[], vocab={"<unk>": 0, **LETTERS}, unk_token="<unk>")
    )


def of_words(model: Any, trainer: Any, words: Any) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = words
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


LETTERS = {letter: number for number, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz", 1)}
UNIGRAM = trainers.UnigramTrainer(vocab_size=300, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False)
WORDS = trainers.WordPieceTrainer(vocab_size=500, special_tokens=["[UNK]"], show_progress=False)
OTHERS = {
    "prefix": trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "prepend": prepending(),
    "wordpiece": of_words(models.WordPiece(unk_token="[UNK]"), WORDS, pre_tokenizers.BertPreTokenizer()),
    **{
        f"metaspace {scheme}": of_words(models.Unigram(), UNIGRAM, pre_tokenizers.Metaspace(prepend_scheme=scheme))
        for scheme in ("always", "first", "never")
    },
}


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
@settings(max_examples=100)
@given(
    text=st.lists(st.one_of(some_text, st.sampled_from([" word", " a b c", "12 34", ":\n", ",\n\n"])), max_size=20).map(
        "".join
    )
)
def test_where_a_document_is_cut_no_token_changes(name: str, text: str) -> None:
    """Whatever the tokeniser makes of blanks, line ends and beginnings."""
    tokenizer = {**QUICK, **OTHERS}[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "_PIECE", 8)
        pieces = list(documents.cut(io.StringIO(text, newline="")))
    assert "".join(piece.text for piece in pieces) == text
    assert [ids for part in Encoder(tokenizer).encode(pieces) for ids in part.tolist()] == right(tokenizer, text)


def test_a_dropout_is_left_out() -> None:
    data = changed(QUICK["gpt2"], lambda values: values["model"].update(dropout=0.5)).to_str().encode()
    assert encoded(parse_tokenizer(data, "it"), TEXTS) == encoded(QUICK["gpt2"], TEXTS)
