"""A Slurm cluster of virtual nodes on this machine: munged, slurmctld and a slurmd for each node, all of our own."""

import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream.fleet.line import free_ports

NODES = 4
CORES = 2
_NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun")


def missing() -> str | None:
    """Why there can be no cluster here."""
    path = os.environ["PATH"] + ":/usr/sbin:/sbin"
    lacking = [name for name in _NEEDED if not shutil.which(name, path=path)]
    if lacking:
        return f"{', '.join(lacking)} not found: apt-get install slurm-wlm munge"
    return None if os.geteuid() == 0 else "Slurm's daemons of this test run as root"


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start one; what its commands need in the environment."""
    folder.mkdir(parents=True, exist_ok=True)
    daemons: list[subprocess.Popen[bytes]] = []
    environment = {
        **os.environ,
        "PATH": os.environ["PATH"] + ":/usr/sbin:/sbin",
        "SLURM_CONF": str(folder / "slurm.conf"),
    }

    def start(*command: str) -> None:
        log = (folder / f"{Path(command[0]).name}-{len(daemons)}.log").open("wb")
        daemons.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    # munged wants folders that nobody else may change.
    munge = Path("/run") / f"slipstream-munge-{secrets.token_hex(4)}"
    munge.mkdir(mode=0o755)
    try:
        (munge / "key").write_bytes(secrets.token_bytes(64))
        (munge / "key").chmod(0o400)
        words = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        start("munged", "--foreground", "--force", *(f"--{option}={munge / name}" for option, name in words.items()))
        _until((munge / "socket").exists)
        (folder / "slurm.conf").write_text(_configuration(folder, munge / "socket"))
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        start("slurmctld", "-D")
        for node in range(1, NODES + 1):
            start("slurmd", "-D", "-N", f"n{node}")
        _until(lambda: _idle(environment) == NODES)
        yield environment
    finally:
        _end_jobs(environment)
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in reversed(daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(munge)


def _end_jobs(environment: dict[str, str]) -> None:
    """What the daemons have started outlives them."""
    for _ in range(100):
        left = ask(environment, "squeue", "--noheader", "--format=%i").split()
        if not left:
            return
        ask(environment, "scancel", "--signal=KILL", "--full", *left)
        ask(environment, "scancel", *left)
        time.sleep(0.2)


def ask(environment: dict[str, str], *words: str) -> str:
    """What one of Slurm's commands says."""
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=30, check=False).stdout


def _idle(environment: dict[str, str]) -> int:
    return len(ask(environment, "sinfo", "--noheader", "--Node", "--states=idle", "--format=%N").split())


def _until(condition: Callable[[], bool], patience: float = 60.0) -> None:
    until = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < until, "the cluster did not come up"
        time.sleep(0.1)


def _configuration(folder: Path, munge: Path) -> str:
    host, ports = socket.gethostname(), free_ports("127.0.0.1", NODES + 2)
    nodes = [
        f"NodeName=n{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={CORES} RealMemory=4000"
        for number, port in enumerate(ports[2:], 1)
    ]
    for name in ("state", "spool"):
        (folder / name).mkdir(exist_ok=True)
    return "\n".join(
        [
            "ClusterName=slipstream",
            f"SlurmctldHost={host}(127.0.0.1)",
            f"SlurmctldPort={ports[0]}",
            f"SlurmdPort={ports[1]}",
            "SlurmUser=root",
            "SlurmdUser=root",
            f"AuthInfo=socket={munge}",
            f"StateSaveLocation={folder}/state",
            f"SlurmdSpoolDir={folder}/spool/%n",
            f"SlurmctldPidFile={folder}/slurmctld.pid",
            f"SlurmdPidFile={folder}/slurmd-%n.pid",
            "ProctrackType=proctrack/linuxproc",
            "TaskPlugin=task/none",
            "MpiDefault=none",
            "SelectType=select/cons_tres",
            "ReturnToService=2",
            "SlurmctldTimeout=30",
            "SlurmdTimeout=60",
            "KillWait=5",
            "SchedulerParameters=sched_interval=1,bf_interval=1",
            *nodes,
            f"PartitionName=main Nodes=n[1-{NODES}] Default=YES MaxTime=INFINITE State=UP OverSubscribe=YES",
            "",
        ]
    )
