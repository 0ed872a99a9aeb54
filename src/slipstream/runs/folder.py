"""A run's folder: what one execution leaves behind, and who may write to it."""

import fcntl
import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

LAUNCHER_LOG = "launcher.log"
"""Among the logs of a run: what was said by who started and watched the ranks."""


_WHAT = ("job.yaml", "program.json")
"""Files of which each run has one: what it runs."""


class RunError(ValueError):
    """A run folder cannot be used as asked."""


class RunFolder:
    """The files of one run. Paths are attributes; `events` is the diary."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.job = self.path / "job.yaml"
        self.program = self.path / "program.json"
        """In place of a job: what is run is somebody's program."""
        self.plan = self.path / "plan.yaml"
        self.metrics = self.path / "metrics.jsonl"
        self.events = self.path / "events.jsonl"
        self.result = self.path / "result.json"
        self.curve = self.path / "curve.png"
        self.checkpoints = self.path / "checkpoints"
        self.export = self.path / "export"
        self.logs = self.path / "logs"
        self.code = self.path / "code"
        self.submission = self.path / "submission.json"
        self._lock = self.path / "lock"
        self.wish = self.path / "stop"

    @property
    def name(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, path: Path, job: dict[str, Any] | None) -> "RunFolder":
        """Make a new folder, for a job or for something else. What is there already is never touched."""
        run = cls(path)
        run.refuse_if_taken()
        try:
            run.checkpoints.mkdir(parents=True, exist_ok=True)
            run.logs.mkdir(exist_ok=True)
            if job is not None:
                write_yaml(run.job, job)
        except OSError as error:
            raise RunError(
                f"{path} cannot be written: {error.strerror}; choose another folder with --run-dir"
            ) from error
        return run

    def refuse_if_taken(self) -> None:
        """A new run needs a folder of its own."""
        if self.job.exists() or self.program.exists():
            raise RunError(f"{self.path} already holds a run; `slipstream resume {self.path}` goes on with it")
        if self.path.is_dir() and any(self.path.iterdir()):
            raise RunError(f"{self.path} is not empty; --run-dir names the new folder of this one run")

    @classmethod
    def open(cls, path: Path) -> "RunFolder":
        """Find an existing run."""
        if not is_run(path):
            raise RunError(f"{path} holds no run (no job.yaml in it); `slipstream runs` lists those there are")
        return cls(path)

    def lock(self, patience: float = 60.0) -> int:
        """Take the run for this process and those it starts: the returned descriptor is inherited by them.

        The lock lasts until the last process that holds the descriptor is gone, so that workers whose launcher was
        killed can never write beside those of a resume, which waits for their end; one that is stuck in a write to a
        busy disk cannot end before that.
        """
        descriptor = os.open(self._lock, os.O_RDWR | os.O_CREAT, 0o644)
        until = time.monotonic() + patience
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until or _is_alive(os.pread(descriptor, 20, 0)):
                    os.close(descriptor)
                    raise RunError(f"{self.path} is being run by another process; wait for it, or stop it") from None
                time.sleep(0.05)
            else:
                os.truncate(descriptor, 0)
                os.pwrite(descriptor, str(os.getpid()).encode(), 0)
                return descriptor

    @property
    def is_running(self) -> bool:
        """Whether some process holds the run."""
        if not self._lock.exists():
            return False
        descriptor = os.open(self._lock, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def wish_to_stop(self) -> None:
        """Ask whoever runs it, wherever that is, to save and stop."""
        self.wish.touch()

    def heard_to_stop(self) -> bool:
        """Whether somebody has wished that. A wish is heard once."""
        heard = self.wish.exists()
        self.wish.unlink(missing_ok=True)
        return heard

    def event(self, kind: str, **facts: Any) -> None:
        """Write a line into the run's diary."""
        append_line(self.events, {"time": round(time.time(), 3), "event": kind, **facts})

    def seconds_spent(self) -> float:
        """Running time so far, over all launches: each records what those before it took."""
        launch: dict[str, Any] | None = None
        last = 0.0
        for event in read_lines(self.events):
            launch = event if event["event"] == "launch" else launch
            last = event["time"]
        if launch is None:
            return 0.0
        if self.metrics.exists():  # a launch that was killed left no last word, but its steps
            last = max(last, self.metrics.stat().st_mtime)
        return float(launch["spent"]) + last - float(launch["time"])

    def mend(self) -> None:
        """Take away the half line that a crash may have left at the end of the diary."""
        if self.events.exists():
            content = self.events.read_bytes()
            if not content.endswith(b"\n"):
                self.events.write_bytes(content[: content.rfind(b"\n") + 1])


def is_run(path: Path) -> bool:
    """Whether a folder holds a run."""
    return any((path / name).exists() for name in _WHAT)


def append_line(path: Path, record: dict[str, Any]) -> None:
    """Add one line of JSON."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a JSON-lines file; one torn by a crash, which can only be the last, is left out."""
    if not path.exists():
        return
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        try:
            yield json.loads(line)
        except ValueError:
            raise RunError(f"{path}:{number} is damaged: it is not a line of JSON; remove that line") from None


def truncate_metrics(path: Path, step: int) -> None:
    """Forget the steps after `step`, so that resuming from there writes each step exactly once."""
    kept = [line for line in read_lines(path) if line["step"] <= step]
    write_text(path, "".join(json.dumps(line) + "\n" for line in kept))


def write_text(path: Path, text: str, secret: bool = False) -> None:
    """Replace a file in one move: a reader sees the old text or the new, never a part; of a secret only its owner."""
    draft = path.with_name(path.name + ".draft")
    if secret:
        draft.unlink(missing_ok=True)  # one that a crash has left may be open to all
        draft.touch(mode=0o600)
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def write_yaml(path: Path, values: dict[str, Any]) -> None:
    """Replace a YAML file in one move."""
    write_text(path, yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def new_run_path(root: Path, name: str) -> Path:
    """`root/name-1`, `root/name-2`, …: the first that is free."""
    taken = [re.fullmatch(re.escape(name) + r"-(\d+)", p.name) for p in root.glob("*")] if root.exists() else []
    return root / f"{name}-{max((int(match[1]) for match in taken if match), default=0) + 1}"


def find_runs(root: Path) -> list[RunFolder]:
    """All runs below a folder, oldest first."""
    found = [file for name in _WHAT for file in root.glob(f"*/{name}")]
    return [RunFolder(file.parent) for file in sorted(found, key=lambda file: file.stat().st_mtime)]


def _is_alive(launcher: bytes) -> bool:
    """Whether the process with this number still runs; not, if it is on another machine."""
    if not launcher.isdigit():
        return False
    try:
        os.kill(int(launcher), 0)
    except OSError as error:
        return isinstance(error, PermissionError)
    return True
