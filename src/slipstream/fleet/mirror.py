"""A run's folder in object storage, for machines that share no disk: copied down before, and up while it runs.

Every machine has a copy of its own and sends what changes in it; no two write the same file. A checkpoint's manifest
comes last there too: only when all the files that it names have come from all machines.
"""

import hashlib
import json
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from slipstream.data.storage import Storage, StorageGone, is_remote
from slipstream.fleet.place import NOTICE, STORE, machine_number
from slipstream.job import load_job
from slipstream.runs import RunError, RunFolder, write_text
from slipstream.runs.cache import cache_folder
from slipstream.runs.checkpoints import MANIFEST, STORED, prune

_EVERY, _TICK = 2.0, 0.1
_SHARE = 0.1
"""Part of the time that may go into sending: a log that grows is sent whole each time."""
_PATIENCE = 600.0
"""Seconds for which a checkpoint is waited for that other machines are still sending."""
SOON = 8.0
"""Seconds in which the storage must answer whoever begins, or only looks."""
_NEVER = {"lock", NOTICE, "submission.json", "stop", f"checkpoints/{STORED}"}
"""Of a machine alone."""
_CHECKPOINTS = "checkpoints"
_TAKEN_BACK = "result.json"
"""It goes when a run goes on."""


class Mirror:
    """The two copies of one run's folder: `run` on this disk, and the one at an address."""

    def __init__(self, run: RunFolder, address: str, patience: float = 60.0) -> None:
        self._run, self._storage = run, Storage(address, patience)
        self._sent: dict[str, tuple[int, int]] = {}
        """Size and time of each file here when both copies were the same."""
        self._had: dict[str, str] = {}
        """What the storage called the version of each file that was fetched."""
        self._took = 0.0

    def remove(self) -> None:
        """All of it there."""
        for name in self._sizes():
            self._storage.delete(name)

    def refuse_if_taken(self) -> None:
        """A new run needs an address of its own."""
        if first_look(self._storage.address):
            raise RunError(f"{self._storage.address} already holds something; choose another machines.store")

    def pull(self) -> dict[str, int]:
        """Everything but checkpoints, as far as it differs. The sizes of all that is there."""
        listed = self._storage.listed()
        if _TAKEN_BACK not in {name for name, _, _ in listed}:
            (self._run.path / _TAKEN_BACK).unlink(missing_ok=True)
        for name, _, stamp in listed:
            known = name in _NEVER or self._had.get(name) == stamp
            if not known and not _in_checkpoint(name):
                self._fetch(name)
                self._had[name] = stamp
        return {name: size for name, size, _ in listed}

    def pull_whole(self) -> None:
        """Everything, of checkpoints the newest whole one: for a machine that begins."""
        names = self.pull()
        for step in sorted(_steps(names), reverse=True):
            if self._fetch_checkpoint(step, names):
                break
        self.forget_changes()

    def forget_changes(self) -> None:
        """Both copies are the same."""
        self._sent = {name: _stamp(file) for name, file in self._files()}

    def _fetch_checkpoint(self, step: str, names: dict[str, int]) -> bool:
        """Make one whole here, if it is whole there."""
        folder = f"{_CHECKPOINTS}/{step}"
        manifest = json.loads(bytes(self._storage.read(f"{folder}/{MANIFEST}")))
        files = {f"{folder}/{name}": facts["bytes"] for name, facts in manifest["files"].items()}
        if any(names.get(name) != size for name, size in files.items()):
            return False
        for name in [*files, f"{folder}/{MANIFEST}"]:
            if not (self._run.path / name).exists():
                self._storage.fetch(name, self._run.path / name)
        return True

    def complete(self, checkpoint: Path) -> None:
        """Get what other machines have written of a checkpoint, when it is there."""
        until = time.monotonic() + _PATIENCE
        while True:
            names = self._sizes()
            if checkpoint.name in _steps(names) and self._fetch_checkpoint(checkpoint.name, names):
                return
            if time.monotonic() > until:
                where = f"{self._storage.address}/{_CHECKPOINTS}/{checkpoint.name}"
                raise StorageGone(f"{where} has not come from all machines in {_PATIENCE:.0f} s")
            time.sleep(1)

    def push(self) -> None:
        """Send what has changed, manifests of checkpoints last, and take away checkpoints that are gone here."""
        began = time.monotonic()
        if _TAKEN_BACK in self._sent and not (self._run.path / _TAKEN_BACK).exists():
            self._storage.delete(_TAKEN_BACK)
            del self._sent[_TAKEN_BACK]
        changed = [(name, file) for name, file in self._files() if self._differs(name, file)]
        manifests = [each for each in changed if _is_manifest(each[0])]
        for name, file in changed:
            if not _is_manifest(name):
                with suppress(FileNotFoundError):  # it has gone meanwhile
                    self._send(name, file)
        if any(_in_checkpoint(name) for name, _ in changed):
            there = self._sizes()
            for name, file in manifests:
                if _all_there(file, name, there):
                    self._send(name, file)
                    write_text(self._run.checkpoints / STORED, _step(name))
            self._tidy(there, writes_manifests=bool(manifests))
        self._took = time.monotonic() - began

    def _tidy(self, there: dict[str, int], writes_manifests: bool) -> None:
        """The machine that writes manifests has removed old checkpoints: so they go there, and from there elsewhere."""
        here = {path.name: path for path in self._run.checkpoints.glob("step-*")}
        if writes_manifests:
            old = [name for name in there if _in_checkpoint(name) and _step(name) not in here]
            for name in sorted(old, key=lambda name: not _is_manifest(name)):  # what is left then is no checkpoint
                if _step(name) < max(here):
                    self._storage.delete(name)
            return
        oldest = min(_steps(there), default="")
        for step in [step for step in here if step < oldest]:
            shutil.rmtree(here[step], ignore_errors=True)

    @contextmanager
    def kept_up(self) -> Iterator[None]:
        """Send now and then while the block runs, and once more after it."""
        ended = threading.Event()
        sender = threading.Thread(target=self._keep_up, args=(ended,), name="mirror", daemon=True)
        sender.start()
        try:
            yield
        finally:
            ended.set()
            sender.join()
            self.push()
            self._push_last_manifests()
            self._prune()

    def _push_last_manifests(self) -> None:
        """Other machines may still be sending what the last checkpoint needs."""
        until = time.monotonic() + _PATIENCE
        while any(_is_manifest(name) and self._differs(name, file) for name, file in self._files()):
            if time.monotonic() > until:
                return
            time.sleep(1)
            self.push()

    def _prune(self) -> None:
        """What was kept only until later checkpoints were there."""
        if self._run.job.exists() and list(self._run.checkpoints.glob(f"*/{MANIFEST}")):
            prune(self._run.checkpoints, load_job(self._run.job).checkpoint.keep)
            self._tidy(self._sizes(), writes_manifests=True)

    def _keep_up(self, ended: threading.Event) -> None:
        while not ended.wait(max(_EVERY, self._took / _SHARE)):
            with suppress(OSError):  # a file may go while it is read, and a storage may be away: it is tried again
                self.push()
                self._hear()

    def pass_on_wish(self) -> None:
        """A wish to stop that was left here is for whoever runs it."""
        if self._run.wish.exists():
            self._send(self._run.wish.name, self._run.wish)
            self._run.wish.unlink()

    def _hear(self) -> None:
        name = self._run.wish.name
        if self._storage.find(name):
            self._storage.delete(name)
            self._run.wish_to_stop()

    def _differs(self, name: str, file: Path) -> bool:
        try:
            return self._sent.get(name) != _stamp(file)
        except FileNotFoundError:
            return False

    def _sizes(self) -> dict[str, int]:
        return {name: size for name, size, _ in self._storage.listed()}

    def _files(self) -> list[tuple[str, Path]]:
        found = [file for file in self._run.path.rglob("*") if file.is_file() and not file.name.endswith(".draft")]
        named = [(file.relative_to(self._run.path).as_posix(), file) for file in found]
        return sorted((name, file) for name, file in named if name not in _NEVER)

    def _send(self, name: str, file: Path) -> None:
        stamp = _stamp(file)
        large = _in_checkpoint(name)  # what is not may grow while it is sent
        self._storage.write(name, file if large else file.read_bytes())
        self._sent[name] = stamp

    def _fetch(self, name: str) -> None:
        place, data = self._run.path / name, bytes(self._storage.read(name))
        known = place.read_bytes() if place.exists() else None
        if known is not None and data.startswith(known):  # it has grown: who reads it goes on where he was
            with place.open("ab") as file:
                file.write(data[len(known) :])
            return
        place.parent.mkdir(parents=True, exist_ok=True)
        draft = place.with_name(place.name + ".draft")
        draft.write_bytes(data)
        draft.replace(place)


def _step(name: str) -> str:
    return name.split("/")[1]


def _steps(names: Iterable[str]) -> set[str]:
    """Of checkpoints with a manifest."""
    return {_step(name) for name in names if _is_manifest(name)}


def _in_checkpoint(name: str) -> bool:
    return name.startswith(f"{_CHECKPOINTS}/")


def _is_manifest(name: str) -> bool:
    return _in_checkpoint(name) and name.endswith(f"/{MANIFEST}")


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _all_there(manifest: Path, name: str, there: dict[str, int]) -> bool:
    files = json.loads(manifest.read_text())["files"]
    folder = name.rpartition("/")[0]
    return all(there.get(f"{folder}/{file}") == facts["bytes"] for file, facts in files.items())


def make_whole(run: RunFolder) -> None:
    """Where this machine has only its own part of the newest checkpoint: get the others' parts."""
    address = os.environ.get(STORE)
    newest = max((path.parent for path in run.checkpoints.glob(f"step-*/{MANIFEST}")), default=None)
    if address and newest:
        Mirror(run, address).complete(newest)


def first_look(address: str) -> list[tuple[str, int, str]]:
    """What is there. Who may not look, or has a wrong address, is to know it soon."""
    return Storage(address, SOON).listed()


@contextmanager
def at_hand(target: str) -> Iterator[RunFolder]:
    """A run's folder, by its path or address, for one machine of the run: what is far away is here meanwhile."""
    if not is_remote(target):
        yield RunFolder.open(Path(target))
        return
    run, mirror = _begin(target, cache_folder() / "runs" / f"{_known_as(target)}-{machine_number() or 0}")
    os.environ[STORE] = target
    with mirror.kept_up():
        yield run


@contextmanager
def changed(target: str) -> Iterator[RunFolder]:
    """A run's folder, by its path or address, for somebody beside the run; what he changes is changed there."""
    if not is_remote(target):
        yield RunFolder(Path(target))
        return
    with tempfile.TemporaryDirectory(prefix="slipstream-") as folder:
        run = RunFolder(Path(folder))
        mirror = Mirror(run, target, patience=SOON)
        mirror.pull()
        mirror.forget_changes()
        run.logs.mkdir(exist_ok=True)
        yield run
        mirror.push()


def _known_as(address: str) -> str:
    """Readable, and not the name of another run."""
    return f"{address.rstrip('/').rpartition('/')[2]}-{hashlib.sha256(address.encode()).hexdigest()[:8]}"


def _begin(address: str, folder: Path) -> tuple[RunFolder, Mirror]:
    """A fresh copy."""
    first_look(address)
    shutil.rmtree(folder, ignore_errors=True)
    run = RunFolder(folder)
    mirror = Mirror(run, address)
    mirror.pull_whole()
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    write_text(run.checkpoints / STORED, max((path.name for path in run.checkpoints.glob("step-*")), default=""))
    run.logs.mkdir(exist_ok=True)
    return RunFolder.open(folder), mirror
