"""Databases as sources: the same documents give the same bytes, and a password is seen nowhere."""

import importlib.util
import json
import random
import signal
import socket
import sqlite3
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from postgres import PASSWORD, USER, Server, postgres
from program import slipstream, start, write_job
from slipstream.data import queries, tokenizer
from slipstream.data.destinations import InFolder
from slipstream.data.documents import Piece
from slipstream.data.making import Making
from slipstream.data.manifest import MANIFEST
from slipstream.data.preparing import prepare_text, text_sources
from slipstream.data.queries import make_query, read_rows
from slipstream.data.writing import PROGRESS
from slipstream.job import JobError, load_job
from slipstream.job.data import TextData

WORDS = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu")
ODD = [None, "", "two\nlines", "grüße, 世界 🌍", "it's 100% of a:b", "long " * 40_000, None]
QUERY = "SELECT body FROM articles WHERE 'of a:b::c 5%' <> '' ORDER BY id;"
MANY = "SELECT id, body FROM many ORDER BY id"


def texts(count: int) -> list[str]:
    draw = random.Random(3)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 800))) for _ in range(count)]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with postgres() as server:
        server.store("articles", [*ODD, *texts(20)])
        server.store("many", list(texts(2000)))
        yield server


def prepared_from_file(documents: list[str | None], folder: Path) -> dict[str, bytes]:
    path = folder / "documents.jsonl"
    path.write_text("".join(json.dumps({"text": text or ""}) + "\n" for text in documents))
    return prepared(folder, str(path))


def prepared(folder: Path, *words: str) -> dict[str, bytes]:
    dest = folder / "dataset"
    done = slipstream("data", "prepare", words[0], dest, *words[1:], *SETTINGS, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    return contents(dest)


SETTINGS = ("--vocabulary", "300", "--shard", "1", "--workers", "1")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    return prepared_from_file([*ODD, *texts(20)], tmp_path_factory.mktemp("file"))


def store_in_file(kind: str, path: Path, documents: list[str | None]) -> None:
    import duckdb

    connection = duckdb.connect(str(path)) if kind == "duckdb" else sqlite3.connect(path)
    connection.execute("CREATE TABLE articles (id INTEGER, body TEXT)")
    connection.executemany("INSERT INTO articles VALUES (?, ?)", list(enumerate(documents))[::-1])
    connection.commit()
    connection.close()


@pytest.mark.parametrize("kind", ["duckdb", "sqlite"])
def test_the_same_bytes_from_a_database_in_a_file(kind: str, expected: dict[str, bytes], tmp_path: Path) -> None:
    store_in_file(kind, tmp_path / "some@where.db", [*ODD, *texts(20)])
    assert prepared(tmp_path, f"{kind}:///some@where.db", "--query", QUERY) == expected


def test_the_same_bytes_from_postgresql(
    server: Server, expected: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    assert prepared(tmp_path, f"postgresql://{USER}@{server.host}/postgres", "--query", QUERY) == expected


def test_any_installed_adbc_driver_is_found(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL's, as if it were one of which nothing is known here."""
    package = importlib.util.find_spec("adbc_driver_postgresql")
    assert package and package.origin
    library = Path(package.origin).with_name("libadbc_driver_postgresql.so")
    (tmp_path / "postgres.toml").write_text(f'name = "PostgreSQL"\n[Driver]\nshared = "{library}"\n')
    monkeypatch.setenv("ADBC_DRIVER_PATH", str(tmp_path))
    monkeypatch.delitem(queries._DRIVERS, "postgres")
    address = server.address.replace("postgresql:", "postgres:")
    rows = [*read_rows(make_query(address, QUERY, None, TextData(source="python-stdlib")))]
    assert sum(row.ends for row in rows) == len([text for text in ODD if text]) + 20


def test_a_killed_preparation_goes_on_and_refuses_other_rows(server: Server, tmp_path: Path) -> None:
    whole = prepared_from_file(list(texts(2000)), tmp_path)
    dest = tmp_path / "again"
    command = ("data", "prepare", server.address, dest, "--query", MANY, "--field", "body", *SETTINGS)
    process = start(*command, cwd=tmp_path)
    while not (dest / PROGRESS).exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not (dest / MANIFEST).exists(), (
        process.stdout and process.stdout.read()
    )
    assert not any(PASSWORD.encode() in data for data in contents(dest).values())
    changes = {
        "UPDATE many SET body = 'changed' WHERE id = 0": f"UPDATE many SET body = '{texts(1)[0]}' WHERE id = 0",
        "ALTER TABLE many RENAME TO kept; CREATE TABLE many AS SELECT * FROM kept WHERE id < 9": (
            "DROP TABLE many; ALTER TABLE kept RENAME TO many"
        ),
    }
    for change, back in changes.items():
        server.execute(*change.split("; "))
        refused = slipstream(*command, cwd=tmp_path)
        assert refused.returncode == 2 and "has changed, or comes in another order" in refused.stderr, refused.stderr
        server.execute(*back.split("; "))
    done = slipstream(*command, cwd=tmp_path)
    assert done.returncode == 0 and "going on after" in done.stdout, done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    assert contents(dest) == whole


# --- what is refused -------------------------------------------------------------------------------------------------


def refused(folder: Path, source: str, query: str | None, field: str | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        sources = text_sources([source], None, 300, field, query)
        prepare_text(sources, Making(InFolder(folder / "refused"), 1, 2**20, False, lambda *_: None, lambda _: None))
    assert PASSWORD not in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


MISTAKES = {
    "no query": ("{address}", None, 'needs a query: --query "SELECT'),
    "not a database": ("some.jsonl", "SELECT 1", "--query needs an address among the sources"),
    "wrong password": (
        "postgresql://{user}:not-{password}@{host}/postgres",
        "SELECT 1",
        "password authentication failed for user \"someone\"; it is taken from the address, PGPASSWORD or ~/.pgpass",
    ),
    "no such database": ("{address}x", "SELECT 1", 'database "postgresx" does not exist'),
    "nobody there": ("postgresql://{user}:{password}@127.0.0.1:1/x", "SELECT 1", "Connection refused"),
    "password not quoted": ("postgresql://{user}:{password}/@{host}/x", "SELECT 1", "cannot be understood"),
    "no host": ("postgresql://{user}:{password}", "SELECT 1", "cannot be understood"),
    "no such table": ("{address}", "SELECT body FROM artikles", 'relation "artikles" does not exist'),
    "several columns": ("{address}", "SELECT id, body FROM articles", "gives the columns id, body; --field says"),
    "not text": ("{address}", "SELECT id FROM articles", "column 'id' holds int64, not text"),
    "no rows": ("{address}", "SELECT body FROM articles WHERE id < 0", "there is no text in postgresql://someone@127"),
    "unknown": ("postgressql://{user}:{password}@{host}/x", "SELECT 1", "knows postgressql:// (did you mean 'postgre"),
    "no file": ("duckdb:///some.db", "SELECT 1", "SOURCE: there is no some.db"),
    "not text in sqlite": ("sqlite:///:memory:", "SELECT 5 AS n", "column 'n' holds int, not text"),
    "no such table in sqlite": ("sqlite://", "SELECT a FROM b", "sqlite://: no such table: b"),
    "no such table in duckdb": ("duckdb://", "SELECT a FROM b", "Table with name b does not exist"),
    "no driver": ("mysql+pymysql://{user}:{password}@{host}/x", "SELECT 1", "needs pymysql: pip install pymysql"),
}  # fmt: skip


def test_a_database_is_only_read(tmp_path: Path) -> None:
    path = tmp_path / "some.db"
    store_in_file("sqlite", path, texts(3))
    assert "readonly" in refused(tmp_path, f"sqlite:///{path}", "DROP TABLE articles")
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM articles").fetchone() == (3,)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named_in_one_line(mistake: str, server: Server, tmp_path: Path) -> None:
    source, query, words = MISTAKES[mistake]
    known = {"address": server.address, "user": USER, "password": PASSWORD, "host": server.host}
    assert words.format(**known) in refused(tmp_path, source.format(**known), query)


def test_a_column_that_is_not_there(server: Server, tmp_path: Path) -> None:
    message = refused(tmp_path, server.address, "SELECT id, body FROM articles", "bodi")
    assert "no column 'bodi' (did you mean 'body'?)" in message


def test_a_missing_package_is_named(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "adbc_driver_postgresql", None)
    assert 'needs adbc-driver-postgresql: pip install "slipstream[sql]"' in refused(
        tmp_path, server.address, "SELECT 1"
    )


def test_a_server_that_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"postgresql://{USER}:{PASSWORD}@127.0.0.1:{silent.getsockname()[1]}/x?connect_timeout=2"
        assert "timeout expired" in refused(tmp_path, address, "SELECT 1")


def test_the_command_refuses_with_its_code(server: Server, tmp_path: Path) -> None:
    wrong = f"postgresql://{USER}:x{PASSWORD}@{server.host}/postgres"
    done = slipstream("data", "prepare", wrong, "dataset", "--query", "SELECT 1", cwd=tmp_path)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and not list(tmp_path.iterdir())
    done = slipstream("data", "prepare", "some.jsonl", wrong, cwd=tmp_path)  # not taken for a folder to make
    assert done.returncode == 2 and "a dataset goes into a folder" in done.stderr and not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["host/db", "db.example.com", "host/a.csv"])
def test_a_job_reads_no_database_and_shows_no_password(place: str, tmp_path: Path) -> None:
    path = write_job(tmp_path, {"name": "a", "data": {"source": f"postgresql://{USER}:{PASSWORD}@{place}"}})
    with pytest.raises(JobError) as caught:
        load_job(path)
    assert "data.source: must be a path, not an address; `slipstream data prepare`" in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_rows_in_no_order_are_warned_of(server: Server, tmp_path: Path) -> None:
    said: list[str] = []
    sources = text_sources([server.address], None, 300, None, "SELECT body FROM articles")
    prepare_text(sources, Making(InFolder(tmp_path / "dataset"), 1, 2**20, False, lambda *_: None, said.append))
    assert "no ORDER BY" in said[0]


@given(
    before=st.text("ABC@:/?#&=%[],;", max_size=6),
    after=st.text("ABC@:/?#&=%[],;", max_size=6),
    form=st.sampled_from(["p://me:{}@host/db", "p:///me:{}@host/db", "p://host/db?password={}"]),
)
def test_a_password_is_never_shown(before: str, after: str, form: str) -> None:
    """Also where it was not quoted as it should be, or the address is wrong."""
    try:
        query = make_query(form.format(f"{before}SECRET{after}"), "SELECT 1", None, TextData(source="python-stdlib"))
    except ValueError as error:
        assert "SECRET" not in str(error)
    else:
        assert "SECRET" not in repr(query)


@given(sizes=st.lists(st.integers(1, 30), max_size=200))
def test_a_tokeniser_is_trained_on_pieces_of_all_parts(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer, "_TRAINING_TEXT", 100)
        kept = tokenizer._thinned(Piece(f"{number:03d}" + "x" * size, True) for number, size in enumerate(sizes))
    numbers = [int(text[:3]) for text in kept]
    steps = {second - first for first, second in pairwise(numbers)}
    assert numbers[:1] == [0][: len(sizes)] and len(steps) <= 1 and sum(map(len, kept)) <= 100
    if len(kept) == len(sizes):
        return
    (step,) = steps or {len(sizes)}
    assert step & (step - 1) == 0 or not steps
    assert numbers[-1] + step >= len(sizes)
