"""A real S3 server (SeaweedFS) on this machine, for as long as a test wants it."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

KEY, SECRET = "someone", "very-secret"
WEED = str(Path(sys.executable).parent / "weed")


class Server:
    """One server, which can be ended and started again with what it had."""

    def __init__(self, folder: Path, host: str = "127.0.0.1") -> None:
        self._folder, self._host = folder, host
        self.ports = dict(zip(("master", "volume", "filer", "s3"), free_ports(4), strict=True))
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        identity = {"name": "someone", "credentials": credentials, "actions": actions}
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": f"http://{self._host}:{self.ports['s3']}",
            "AWS_REGION": "us-east-1",
        }

    def start(self, wait: float = 60) -> None:
        (self._folder / "data").mkdir(exist_ok=True)
        ports = [f"-{name}.port={port}" for name, port in self.ports.items()]
        command = [
            WEED, "-logtostderr", "server", f"-dir={self._folder / 'data'}",
            f"-ip={self._host}", f"-ip.bind={self._host}", "-s3", f"-s3.config={self._folder / 's3.json'}",
            "-volume.max=20", "-master.volumeSizeLimitMB=256", "-s3.port.iceberg=0", "-s3.port.lance=0", *ports,
        ]  # fmt: skip
        with (self._folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        until = time.monotonic() + wait
        while not (self._answers("s3") and self._answers("filer")):
            assert self.process.poll() is None and time.monotonic() < until, (self._folder / "log").read_text()[-3000:]
            time.sleep(0.1)

    def make_bucket(self, name: str) -> None:
        """By the server's own shell: obstore makes none."""
        master, filer = (f"{self._host}:{self.ports[part]}" for part in ("master", "filer"))
        command = [WEED, "shell", f"-master={master}", f"-filer={filer}"]
        words = f"s3.bucket.create -name {name}\nexit\n"
        done = subprocess.run(command, input=words, capture_output=True, text=True, timeout=60)
        assert "error" not in done.stdout.lower(), done.stdout + done.stderr

    def kill(self) -> None:
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _answers(self, name: str) -> bool:
        try:
            socket.create_connection((self._host, self.ports[name]), timeout=1).close()
            return True
        except OSError:
            return False


@contextmanager
def serving(folder: Path, bucket: str) -> Iterator[Server]:
    """A server with a bucket, which the environment knows meanwhile."""
    server = Server(folder)
    server.start()
    server.make_bucket(bucket)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server
    server.kill()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has, nor the ones ten thousand above them, which the server takes too."""
    found: list[int] = []
    for port in range(20_000 + os.getpid() * 16 % 8000, 32_000):  # processes that start together look far apart
        if len(found) == count:
            break
        if all(is_free(each) for each in (port, port + 10_000)):
            found.append(port)
    return found


def is_free(port: int) -> bool:
    with socket.socket() as trial:
        try:
            trial.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
