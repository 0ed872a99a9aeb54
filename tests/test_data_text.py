"""Text becomes tokens once, the same ones for everybody."""

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from backports import zstd
from tokenizers import Tokenizer, models, pre_tokenizers

from slipstream.data import IGNORED, Facts, mask_id, open_dataset, prepare, text_info
from slipstream.data import documents as documents_module
from slipstream.data.documents import Piece, find_files, read_pieces
from slipstream.data.store import read_offsets, read_tokens
from slipstream.data.text import text_tokenizer
from slipstream.job import Job
from slipstream.job.data import TextData
from slipstream.runs.cache import cache_folder

VERSE = "the quick brown fox jumps over the lazy dog; naïve café, 東京。\n"


def make_job(data: dict[str, Any], task: str = "next-token") -> Job:
    train = {"steps": 1, "batch": 1, "task": task, "optimizer": {"name": "sgd", "lr": 0.1}}
    return Job.model_validate({"name": "test", "model": {"import": "a.b:C"}, "data": data, "train": train})


def prepared(data: dict[str, Any], task: str = "next-token") -> Job:
    job = make_job(data, task)
    prepare(job, notify=lambda _: None)
    return job


def refused(data: dict[str, Any], task: str = "next-token") -> str:
    with pytest.raises(ValueError) as caught:
        prepared(data, task)
    return str(caught.value).replace(f"{Path.cwd()}/", "")


def texts(job: Job) -> list[str]:
    """The documents as stored, decoded."""
    folder = text_tokenizer(job).parent
    tokens, offsets = read_tokens(folder), read_offsets(folder)
    tokenizer = Tokenizer.from_file(str(text_tokenizer(job)))
    return [
        tokenizer.decode(tokens[start:end].tolist(), skip_special_tokens=False)
        for start, end in itertools.pairwise(offsets.tolist())
    ]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "cache"


# --- what is read ----------------------------------------------------------------------------------------------------


def test_a_file_is_one_document_that_ends() -> None:
    Path("a.txt").write_text(VERSE * 50, encoding="utf-8")
    job = prepared({"source": "a.txt", "vocabulary": 300, "sequence": 16})
    assert texts(job) == [VERSE * 50 + "<|endoftext|>"]


def test_a_folder_has_a_document_for_each_file_in_order() -> None:
    for name in ("b.txt", "a/z.txt", "a/a.txt", "a/not.md", "empty.txt"):
        Path("corpus", name).parent.mkdir(parents=True, exist_ok=True)
        Path("corpus", name).write_text("" if name == "empty.txt" else f"I am {name}", encoding="utf-8")
    job = prepared({"source": "./corpus", "vocabulary": 258, "sequence": 4})
    assert [text.removesuffix("<|endoftext|>") for text in texts(job)] == ["I am a/a.txt", "I am a/z.txt", "I am b.txt"]
    assert text_info(job).documents == 3


def test_jsonl() -> None:
    Path("a.jsonl").write_text(
        '{"text": "one\\ntwo"}\n\n{"text": "", "x": 1}\n{"text": null}\n{"text": "three"}\n', encoding="utf-8"
    )
    job = prepared({"source": "a.jsonl", "vocabulary": 258, "sequence": 4})
    assert texts(job) == ["one\ntwo<|endoftext|>", "three<|endoftext|>"]
    Path("b.jsonl").write_text('{"body": "one two"}', encoding="utf-8")
    assert texts(prepared({"source": "b.jsonl", "field": "body", "sequence": 2})) == ["one two<|endoftext|>"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{'text': 1}", "a.jsonl:3: is not valid JSON: Expecting property name"),
        ('["text"]', 'a.jsonl:3: each line must be an object such as {"text": "…"}'),
        ('{"txt": "a"}', "a.jsonl:3: has no key 'text' (did you mean 'txt'?); data.field says which"),
        ('{"text": 5}', "a.jsonl:3: 'text' holds int, not text"),
        ('{"text": "a \\ud83d b"}', "a.jsonl:3: 'text' holds half a character (\\ud83d)"),
        ("[" * 100_000, "a.jsonl:3: cannot be read as JSON: maximum recursion depth"),
        ("1" * 5_000, "a.jsonl:3: cannot be read as JSON: Exceeds the limit"),
    ],
)
def test_a_bad_line_is_named(line: str, expected: str, cache: Path) -> None:
    Path("a.jsonl").write_text('{"text": "fine"}\n\n' + line + "\n", encoding="utf-8")
    assert expected in refused({"source": "a.jsonl"})
    assert list((cache / "text").iterdir()) == []


def test_what_cannot_be_read() -> None:
    assert "data.source: there is no a.txt in" in refused({"source": "a.txt"})
    Path("b.txt").write_bytes(b"caf\xe9")
    assert "(did you mean 'b.txt'?)" in refused({"source": "a.txt"})
    assert "b.txt is not UTF-8 text" in refused({"source": "b.txt"})
    Path("c").mkdir()
    assert "there is no file in" in refused({"source": "./c"})
    assert "there is no d in" in refused({"source": "./d"})
    Path("d").touch()
    assert "the name of d ends in none of .txt, .txt.gz" in refused({"source": "./d"})


def test_pieces_of_a_long_document_give_the_tokens_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(f"{VERSE}\n\n   indented  {i}\t\n" for i in range(200))
    Path("a.txt").write_text(text, encoding="utf-8")
    data = TextData(source="a.txt")
    monkeypatch.setattr(documents_module, "_PIECE", 64)
    pieces = list(read_pieces(data, find_files(data)))
    assert len(pieces) > 100
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.ends for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    job = prepared({"source": "a.txt", "vocabulary": 400, "sequence": 8})
    whole = Tokenizer.from_file(str(text_tokenizer(job))).encode(text).ids
    assert read_tokens(text_tokenizer(job).parent).tolist() == [*whole, text_info(job).end_of_text]


def test_a_document_without_any_blank_is_cut_all_the_same() -> None:
    Path("a.txt").write_text("東" * 2_500_000, encoding="utf-8")
    data = TextData(source="a.txt")
    assert [len(piece.text) for piece in read_pieces(data, find_files(data))] == [2**20, 2**20, 2_500_000 - 2**21]


def test_a_tokeniser_is_trained_on_words_without_end() -> None:
    """Of one word of so many letters the library would not be done in hours."""
    letters = np.random.default_rng(0).integers(97, 123, 1_000_000, dtype=np.uint8).tobytes().decode()
    Path("a.txt").write_text(letters, encoding="utf-8")
    assert texts(prepared({"source": "a.txt", "vocabulary": 300, "sequence": 16})) == [letters + "<|endoftext|>"]


def test_a_long_field_of_a_table_and_its_line_ends() -> None:
    text = 'a "quoted"\r\nword\r' * 20_000
    Path("a.csv").write_text('text\n"' + text.replace('"', '""') + '"\n', encoding="utf-8", newline="")
    data = TextData(source="a.csv")
    assert "".join(piece.text for piece in read_pieces(data, find_files(data))) == text


def test_a_packed_file_that_is_cut_off_or_damaged() -> None:
    whole = zstd.compress("".join(f"{number} " for number in range(500_000)).encode())
    for data in (whole[: len(whole) // 2], whole[:-1], b"not packed at all"):
        Path("a.txt.zst").write_bytes(data)
        source = TextData(source="a.txt.zst")
        with pytest.raises(ValueError, match=r"a\.txt\.zst is cut off or damaged"):
            list(read_pieces(source, find_files(source)))


# --- samples ---------------------------------------------------------------------------------------------------------


def test_packed_samples() -> None:
    Path("a.txt").write_text(VERSE * 50, encoding="utf-8")
    job = prepared({"source": "a.txt", "vocabulary": 300, "sequence": 16})
    dataset, tokens = open_dataset(job), read_tokens(text_tokenizer(job).parent).astype(int)
    assert dataset.facts == Facts(inputs=(16,), outputs=300, tokens=True)
    assert len(dataset) == (len(tokens) - 1) // 16
    batch = dataset.fetch(np.array([2, 0]))
    assert batch.inputs.tolist() == [tokens[32:48].tolist(), tokens[:16].tolist()]
    assert batch.targets.tolist() == [tokens[33:49].tolist(), tokens[1:17].tolist()]


def test_masked_samples() -> None:
    Path("a.txt").write_text(VERSE * 50, encoding="utf-8")
    job = prepared({"source": "a.txt", "vocabulary": 300, "sequence": 16}, "masked-token")
    dataset, tokens = open_dataset(job), read_tokens(text_tokenizer(job).parent).astype(int)
    batch = dataset.fetch(np.array([1]))
    assert len(dataset) == len(tokens) // 16
    assert batch.inputs.tolist() == batch.targets.tolist() == [tokens[16:32].tolist()]
    assert mask_id(job) == 1


def test_unpacked_lines_are_padded_and_cut() -> None:
    Path("a.txt").write_text("ab\n\n  \nabcdefgh\n c \n", encoding="utf-8")
    job = prepared({"source": "a.txt", "vocabulary": 258, "sequence": 4, "pack": False})
    assert texts(job) == ["ab<|endoftext|>", "abcdefgh<|endoftext|>", "c<|endoftext|>"]
    encode = Tokenizer.from_file(str(text_tokenizer(job))).encode
    a, b, c, d, e = encode("abcde").ids
    end = text_info(job).end_of_text
    batch = open_dataset(job).fetch(np.array([0, 1, 2]))
    assert batch.inputs.tolist() == [[a, b, end, end], [a, b, c, d], [c, end, end, end]]
    assert batch.targets.tolist() == [[b, end, IGNORED, IGNORED], [b, c, d, e], [end, IGNORED, IGNORED, IGNORED]]


def test_packing_a_file_keeps_it_whole_and_has_its_own_place() -> None:
    Path("a.txt").write_text("one line\nanother line\n", encoding="utf-8")
    packed = prepared({"source": "a.txt", "sequence": 4})
    lines = prepared({"source": "a.txt", "sequence": 4, "pack": False})
    assert (text_info(packed).documents, text_info(lines).documents) == (1, 2)


def test_too_little_text() -> None:
    Path("a.txt").write_text("few words", encoding="utf-8")
    assert "a.txt has 10 tokens, fewer than one sequence of 256" in refused({"source": "a.txt", "vocabulary": 258})
    Path("a.txt").write_text("", encoding="utf-8")
    assert "a.txt has 0 tokens" in refused({"source": "a.txt"})
    assert "no document of at least two tokens" in refused({"source": "a.txt", "pack": False})


def test_257_tokens_leave_no_room_for_the_mask() -> None:
    Path("a.txt").write_text(VERSE, encoding="utf-8")
    assert "at least 258" in refused({"source": "a.txt", "vocabulary": 257})


# --- the user's tokeniser --------------------------------------------------------------------------------------------


def write_tokenizer(path: str, *special: str) -> None:
    words = {word: number for number, word in enumerate(["?", "one", "two", "three", *special])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=50)
    tokenizer.save(path)


def test_own_tokenizer() -> None:
    Path("a.jsonl").write_text('{"text": "one two three"}\n{"text": "two"}\n', encoding="utf-8")
    write_tokenizer("t.json", "[SEP]", "[MASK]")
    job = prepared({"source": "a.jsonl", "tokenizer": "t.json", "sequence": 5}, "masked-token")
    assert read_tokens(text_tokenizer(job).parent).tolist() == [1, 2, 3, 4, 2, 4]
    assert (mask_id(job), open_dataset(job).facts.outputs) == (5, 6)
    assert text_tokenizer(job).read_bytes() == Path("t.json").read_bytes()


def test_own_tokenizer_without_special_tokens() -> None:
    Path("a.jsonl").write_text('{"text": "one two three"}\n{"text": "two"}\n', encoding="utf-8")
    write_tokenizer("t.json")
    data = {"source": "a.jsonl", "tokenizer": "t.json", "sequence": 2}
    assert read_tokens(text_tokenizer(prepared(data)).parent).tolist() == [1, 2, 3, 2]
    unpacked = open_dataset(prepared(data | {"pack": False, "sequence": 3}))
    assert len(unpacked) == 1  # the lone word of the second document has nothing to predict
    batch = unpacked.fetch(np.array([0]))
    assert (batch.inputs.tolist(), batch.targets.tolist()) == ([[1, 2, 3]], [[2, 3, IGNORED]])
    assert "data.tokenizer: t.json has no mask token (<|mask|>, [MASK] or <mask>)" in refused(data, "masked-token")


def test_bad_tokenizer() -> None:
    Path("a.txt").write_text(VERSE, encoding="utf-8")
    Path("t.json").write_text("{}", encoding="utf-8")
    assert "data.tokenizer: t.json is not a tokenizer.json" in refused({"source": "a.txt", "tokenizer": "t.json"})
    assert "data.tokenizer: there is no u.json" in refused({"source": "a.txt", "tokenizer": "u.json"})


def test_a_large_vocabulary_takes_four_bytes() -> None:
    words = {f"w{number}": number for number in range(70_000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save("t.json")
    Path("a.txt").write_text("w69999 w1 w2 w3", encoding="utf-8")
    tokens = read_tokens(text_tokenizer(prepared({"source": "a.txt", "tokenizer": "t.json", "sequence": 2})).parent)
    assert (tokens.dtype, tokens.tolist()) == (np.uint32, [69_999, 1, 2, 3])


# --- the cache -------------------------------------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache_folder() == Path("/x/slipstream")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_folder() == Path("/home/me/.cache/slipstream")


def test_the_work_is_done_once_and_told(cache: Path) -> None:
    Path("a.txt").write_text(VERSE * 50, encoding="utf-8")
    job, lines = make_job({"source": "a.txt", "vocabulary": 300, "sequence": 16}), []
    prepare(job, lines.append)
    assert lines[:2] == ["reading 1 file", "training a tokeniser of 300 tokens"]
    assert lines[2].endswith("tokens of 300 kinds, 1 document")
    (folder,) = (cache / "text").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == [
        "info.json",
        "offsets.npy",
        "tokenizer.json",
        "tokens.npy",
    ]
    assert json.loads((folder / "info.json").read_text())["tokens"] == len(np.load(folder / "tokens.npy"))
    lines.clear()
    prepare(job, lines.append)
    assert lines == []


@pytest.mark.parametrize("change", [{"vocabulary": 301}, {"source": "b.txt"}, {"pack": False}])
def test_what_changes_the_result_changes_its_place(change: dict[str, Any]) -> None:
    Path("a.txt").write_text(VERSE * 50, encoding="utf-8")
    shutil.copy2("a.txt", "b.txt")
    data = {"source": "a.txt", "vocabulary": 300, "sequence": 16}
    assert text_tokenizer(prepared(data)) != text_tokenizer(prepared(data | change))
    assert text_tokenizer(prepared(data)) == text_tokenizer(prepared(data | {"sequence": 17}))


def test_changed_text_must_be_prepared_again() -> None:
    Path("a.txt").write_text(VERSE * 50, encoding="utf-8")
    job = prepared({"source": "a.txt", "vocabulary": 300, "sequence": 16})
    os.utime("a.txt", ns=(0, 0))
    with pytest.raises(ValueError, match=r"a.txt is not in .*, or changed after it was prepared"):
        open_dataset(job)


def test_the_same_text_gives_the_same_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each machine prepares for itself; the curve must not depend on which machine it was."""
    source = Path(documents_module.__file__).parents[1]
    Path("a.txt").write_text("".join(path.read_text() for path in sorted(source.rglob("*.py"))), encoding="utf-8")
    job = prepared({"source": "a.txt", "vocabulary": 1000})
    first = [path.read_bytes() for path in sorted(text_tokenizer(job).parent.iterdir())]
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "another machine"))
    prepared({"source": "a.txt", "vocabulary": 1000})
    assert first == [path.read_bytes() for path in sorted(text_tokenizer(job).parent.iterdir())]


def _prepare_in_process(start: Any, lines: Any) -> None:
    start.wait()
    prepare(make_job({"source": "a.txt", "vocabulary": 300, "sequence": 16}), lines.put)


def test_two_processes_at_once(cache: Path) -> None:
    Path("a.txt").write_text(VERSE * 2000, encoding="utf-8")
    spawn = multiprocessing.get_context("spawn")
    start, lines = spawn.Barrier(2), spawn.Queue()
    workers = [spawn.Process(target=_prepare_in_process, args=(start, lines)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=30)
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert len(list((cache / "text").iterdir())) == 1
    assert len(open_dataset(make_job({"source": "a.txt", "vocabulary": 300, "sequence": 16}))) > 100


def test_the_second_to_finish_discards_its_work(cache: Path) -> None:
    Path("a.txt").write_text(VERSE * 50, encoding="utf-8")
    job = make_job({"source": "a.txt", "vocabulary": 300, "sequence": 16})
    first_is_done = iter([True])

    def overtaken(_: str) -> None:
        if next(first_is_done, False):
            prepare(job, notify=lambda _: None)

    prepare(job, overtaken)
    assert len(list((cache / "text").iterdir())) == 1
    assert len(open_dataset(job)) > 10


def test_an_interrupted_build_leaves_nothing(cache: Path) -> None:
    Path("a.txt").write_text(VERSE * 50, encoding="utf-8")
    job = make_job({"source": "a.txt", "vocabulary": 300, "sequence": 16})

    def interrupt(line: str) -> None:
        if "tokens of" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(job, interrupt)
    assert list((cache / "text").iterdir()) == []


def test_a_killed_build_is_not_chosen(cache: Path) -> None:
    Path("a.txt").write_text(VERSE * 50, encoding="utf-8")
    data = {"source": "a.txt", "vocabulary": 300, "sequence": 16}
    program = f"""
import os, signal
from slipstream.data import prepare
from slipstream.job import Job
train = {{"steps": 1, "batch": 1, "task": "next-token", "optimizer": {{"name": "sgd", "lr": 0.1}}}}
job = Job.model_validate({{"name": "test", "model": {{"import": "a.b:C"}}, "data": {data!r}, "train": train}})
prepare(job, lambda line: os.kill(os.getpid(), signal.SIGKILL) if "tokens of" in line else None)
"""
    assert subprocess.run([sys.executable, "-c", program]).returncode == -signal.SIGKILL
    assert len(list((cache / "text").iterdir())) == 1  # the draft, under a name that is never asked for
    with pytest.raises(ValueError, match="is not in"):
        open_dataset(make_job(data))
    assert len(open_dataset(prepared(data))) > 10


# --- Python's own library --------------------------------------------------------------------------------------------


def test_stdlib_files() -> None:
    names = [str(path) for path in find_files(TextData(source="python-stdlib"))]
    assert len(names) > 400
    assert names == sorted(names)
    assert any(name.endswith("json/decoder.py") for name in names)
    assert not any(word in name for name in names for word in ("site-packages", "/test/", "/tests/", "/idle_test/"))


def test_stdlib_is_read_without_its_undecodable_files(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("good.py").write_text("x = 1\n", encoding="utf-8")
    Path("latin.py").write_bytes(b"x = '" + b"a" * 200_000 + b" \xe9'\n")
    monkeypatch.setattr(documents_module, "_stdlib_files", lambda: [Path("good.py"), Path("latin.py")])
    data = TextData(source="python-stdlib")
    assert list(read_pieces(data, find_files(data))) == [Piece("x = 1\n", ends=True)]


def test_stdlib_is_found_in_the_cache_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    some = find_files(TextData(source="python-stdlib"))[:40]
    monkeypatch.setattr(documents_module, "_stdlib_files", lambda: some)
    prepared({"source": "python-stdlib"})
    start = time.monotonic()
    prepared({"source": "python-stdlib"})
    assert time.monotonic() - start < 0.5
