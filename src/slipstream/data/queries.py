"""Text from a database: the rows of a query. They are read as they come, some at a time, and never held together.

PostgreSQL, DuckDB, Snowflake and BigQuery are read by ADBC, in Arrow's batches; so is what has an ADBC driver installed
on the machine and is unknown to SQLAlchemy, by which all others are read."""

import dataclasses
import io
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, unquote

from slipstream.data.checks import existing_file, first_line, nearest, need_extra
from slipstream.data.documents import Piece, cut
from slipstream.data.storage import is_remote
from slipstream.job.data import TextData

# So strict that no part of a password, mistyped, is taken for something else and shown.
_HOST = r"(?:\[[^]/?#@]*]|[^][:,/?#@]*)(?::\d*)?"
_ADDRESS = re.compile(
    r"(?P<scheme>[a-z][a-z0-9+.-]*)://"
    r"(?:(?P<user>[^:/?#@]*)(?::(?P<password>[^/?#@]*))?@)?"
    rf"(?P<host>{_HOST}(?:,{_HOST})*)(?P<path>/[^?#@]*)?(?:\?(?P<params>[^@]*))?"
)
_IN_FILES = ("duckdb", "sqlite")
_FILE = re.compile(rf"(?P<scheme>(?:{'|'.join(_IN_FILES)})(?:\+\w+)?)://(?P<path>/[^?]*)?(?:\?(?P<params>.*))?")
_SECRET = re.compile(r"pass|pwd|token|secret|key|cred|odbc_connect", re.IGNORECASE)  # parameters that nobody should see
_ORDER = re.compile(r"\border\s+by\b", re.IGNORECASE)
_ROWS = 1000  # of SQLAlchemy, at a time
_PATIENCE = 5  # seconds to connect
_WITH_TIMEOUT = ("psycopg", "psycopg2", "pymysql", "mysqldb")  # SQLAlchemy's drivers that know `connect_timeout`
UNORDERED = (
    "the query has no ORDER BY: the database may give its rows in another order next time, which would make another "
    "dataset, and a preparation that was ended could not go on"
)


class QueryError(ValueError):
    """What is wrong with an address, a query, or what came of it; without secrets."""


@dataclasses.dataclass(frozen=True)
class Query:
    """A source of text, beside files: each row is a document."""

    source: str
    """The address without password and parameters: what may be shown and written down."""
    sql: str
    field: str | None
    """The column that holds the text. Default: the only one."""
    tokenizer: str | None
    vocabulary: int | None
    address: str = dataclasses.field(repr=False, compare=False)


def is_address(name: str) -> bool:
    """Whether a source is a database, and not a file."""
    return re.match(r"[a-z][a-z0-9+.-]*://", name) is not None and not is_remote(name)


def make_query(address: str, sql: str, column: str | None, settings: TextData) -> Query:
    """`settings` has the tokeniser. Raises ValueError."""
    found = _parse(address)
    who = f"{found['user']}@" if found["user"] else ""
    shown = f"{found['scheme']}://{who}{found['host']}{found['path'] or ''}"
    return Query(shown, sql.strip().rstrip(";"), column, settings.tokenizer, settings.vocabulary, address)


def check_query(query: Query, say: Callable[[str], None]) -> None:
    """What is missing is said before anything is written, and one connection is made."""
    driver, found = _driver(query), _parse(query.address)
    if driver:
        need_extra("pyarrow", "pyarrow", driver.extra, query.source)
        need_extra(driver.module, driver.package, driver.extra, query.source)
    if found["scheme"].startswith(_IN_FILES) and (path := _file(found)):
        existing_file(path, "SOURCE")  # SQLite would make it
    with _plain_errors(query), _connect(query):
        pass
    if not _ORDER.search(query.sql):
        say(UNORDERED)


def read_rows(query: Query) -> Iterator[Piece]:
    """All text, row after row. NULL and empty text is left out."""
    with _plain_errors(query), _connect(query) as connection:
        texts = _arrow_texts if _driver(query) else _plain_texts
        for text in texts(query, connection):
            yield from cut(io.StringIO(text or ""))


def _arrow_texts(query: Query, connection: Any) -> Iterator[str | None]:
    from pyarrow import types

    with connection.cursor() as cursor:
        cursor.execute(query.sql)
        batches = cursor.fetch_record_batch()
        place = _column(query, batches.schema.names)
        kind = batches.schema.types[place]
        held = kind.value_type if types.is_dictionary(kind) else kind  # DuckDB's ENUM
        if not (types.is_string(held) or types.is_large_string(held) or types.is_string_view(held)):
            raise _not_text(query, batches.schema.names[place], kind)
        for batch in batches:
            yield from batch.column(place).to_pylist()


def _plain_texts(query: Query, connection: Any) -> Iterator[str | None]:
    from sqlalchemy import text

    # By a cursor that stays on the server, where the driver has such.
    streaming = connection.execution_options(stream_results=True, yield_per=_ROWS)
    result = streaming.execute(text(query.sql.replace(":", r"\:")))  # nothing in it is a parameter
    if not result.returns_rows:
        raise QueryError(f"{query.source}: the query gives no rows; it must be a SELECT")
    names = list(result.keys())
    place = _column(query, names)
    for row in result:
        if not isinstance(row[place], str | None):
            raise _not_text(query, names[place], type(row[place]).__name__)
        yield row[place]


def _column(query: Query, names: Sequence[str]) -> int:
    if query.field is None and len(names) == 1:
        return 0
    if query.field is None:
        raise QueryError(f"the query gives the columns {', '.join(names)}; --field says which one holds the text")
    if query.field not in names:
        hint = nearest(query.field, names) or f"; it gives {', '.join(names)}"
        raise QueryError(f"the query gives no column {query.field!r}{hint}; --field says which one holds the text")
    return names.index(query.field)


def _not_text(query: Query, name: str, kind: object) -> QueryError:
    return QueryError(
        f"{query.source}: column {name!r} holds {kind}, not text; make text of it in the query, with CAST"
    )


# --- connecting ------------------------------------------------------------------------------------------------------


class _Driver(NamedTuple):
    """How to reach a database by ADBC."""

    module: str
    package: str
    extra: str
    connect: Callable[[str], Any]


def _connect_postgresql(address: str) -> Any:
    from adbc_driver_postgresql import dbapi

    if "PGCONNECT_TIMEOUT" not in os.environ:
        address = _with_parameter(address, "connect_timeout", _PATIENCE)
    return dbapi.connect(address)


def _connect_duckdb(address: str) -> Any:
    from adbc_driver_duckdb import driver_path
    from adbc_driver_manager import dbapi

    found = _parse(address)
    options = {"memory_limit": "1GB", **dict(parse_qsl(found["params"] or ""))}  # sorting more, it uses the disk
    if path := _file(found):
        options |= {"path": path, "access_mode": "READ_ONLY"}
    return dbapi.connect(driver_path(), entrypoint="duckdb_adbc_init", db_kwargs=options)


def _connect_snowflake(address: str) -> Any:
    from adbc_driver_snowflake import dbapi

    return dbapi.connect(_with_parameter(address, "loginTimeout", _PATIENCE))


def _connect_bigquery(address: str) -> Any:
    """Who one is, Google's own settings say: GOOGLE_APPLICATION_CREDENTIALS, or `gcloud auth`."""
    from adbc_driver_bigquery import DatabaseOptions, dbapi

    found = _parse(address)
    options = {DatabaseOptions.PROJECT_ID.value: found["host"] or ""}
    if found["path"]:
        options[DatabaseOptions.DATASET_ID.value] = found["path"].strip("/")
    return dbapi.connect(options, autocommit=True)  # it knows nothing else


def _connect_installed(address: str) -> Any:
    """By the driver that is installed under the name of the scheme."""
    from adbc_driver_manager import ProgrammingError, dbapi

    try:
        return dbapi.connect(uri=address)
    except ProgrammingError as error:
        if "[Driver Manager]" not in str(error):
            raise
        scheme = _scheme(address)
        raise QueryError(
            f"neither SQLAlchemy nor ADBC knows {scheme}://{nearest(scheme, _DRIVERS)}; install a driver for it"
        ) from None


_POSTGRESQL = _Driver("adbc_driver_postgresql", "adbc-driver-postgresql", "sql", _connect_postgresql)
_DRIVERS = {
    "postgresql": _POSTGRESQL,
    "postgres": _POSTGRESQL,
    "duckdb": _Driver("adbc_driver_duckdb", "duckdb", "sql", _connect_duckdb),
    "snowflake": _Driver("adbc_driver_snowflake", "adbc-driver-snowflake", "snowflake", _connect_snowflake),
    "bigquery": _Driver("adbc_driver_bigquery", "adbc-driver-bigquery", "bigquery", _connect_bigquery),
}
_INSTALLED = _Driver("adbc_driver_manager", "adbc-driver-manager", "sql", _connect_installed)


def _driver(query: Query) -> _Driver | None:
    """None for SQLAlchemy."""
    scheme = _scheme(query.address)
    if scheme in _DRIVERS:
        return _DRIVERS[scheme]
    need_extra("sqlalchemy", "sqlalchemy", "sql", query.source)
    from sqlalchemy import make_url
    from sqlalchemy.exc import NoSuchModuleError

    try:
        make_url(f"{scheme}://").get_dialect()
    except NoSuchModuleError:
        return _INSTALLED
    return None


@contextmanager
def _connect(query: Query) -> Iterator[Any]:
    driver = _driver(query)
    if driver is None:
        with _engine(query).connect() as connection:
            if connection.dialect.name == "sqlite":  # which changes tables outside of transactions
                connection.exec_driver_sql("PRAGMA query_only = ON")
            yield connection
        return
    with driver.connect(query.address) as connection:
        yield connection


def _engine(query: Query) -> Any:
    from sqlalchemy import NullPool, create_engine, make_url

    url = make_url(query.address)
    patience = {"connect_timeout": _PATIENCE} if url.get_driver_name() in _WITH_TIMEOUT else {}
    try:
        return create_engine(url, poolclass=NullPool, connect_args=patience)
    except ModuleNotFoundError as error:
        raise QueryError(f"{query.source} needs {error.name}: pip install {error.name}") from None


# --- addresses and secrets -------------------------------------------------------------------------------------------


def _parse(address: str) -> dict[str, Any]:
    found = _FILE.fullmatch(address) or _ADDRESS.fullmatch(address)
    if found is None:  # no part of it is shown: it may be the password
        scheme = _scheme(address)
        raise QueryError(
            f"the address {scheme}://… cannot be understood; it is {scheme}://user@host:port/database, and in names "
            "and passwords @ : / ? # are written as %40 %3A %2F %3F %23"
        )
    return {"user": None, "password": None, "host": "", **found.groupdict()}


def _scheme(address: str) -> str:
    return address.partition("://")[0]


def _file(found: dict[str, Any]) -> str | None:
    """The path of a database that is a file: after three slashes a relative one, after four an absolute one."""
    path: str = (found["path"] or "")[1:]
    return None if path in ("", ":memory:") else path


def _with_parameter(address: str, name: str, value: int) -> str:
    if f"{name}=" in address:
        return address
    return f"{address}{'&' if '?' in address else '?'}{name}={value}"


@contextmanager
def _plain_errors(query: Query) -> Iterator[None]:
    """Whatever a driver raises becomes one line without secrets."""
    try:
        yield
    except QueryError:
        raise
    except Exception as error:  # every driver has its own
        raise QueryError(_without_secrets(f"{query.source}: {_in_a_line(error)}", query.address)) from None


def _in_a_line(error: Exception) -> str:
    text = str(getattr(error, "orig", None) or error)  # SQLAlchemy's adds the query and a link to what the driver said
    text = re.sub(r"^[A-Z_]+: (\[\w+\] )?", "", text)  # ADBC's kind of error, and the driver
    line = first_line(error, text)
    if "password" in line and "libpq" in str(error):
        return f"{line}; it is taken from the address, PGPASSWORD or ~/.pgpass"
    return line


def _without_secrets(text: str, address: str) -> str:
    found = _parse(address)
    values = [value for name, value in parse_qsl(found["params"] or "") if _SECRET.search(name)]
    for secret in (found["password"], unquote(found["password"] or ""), *values):
        if secret:
            text = text.replace(secret, "…")
    return text
