"""The fleet `slurm`: a batch script that starts one agent on every node."""

import re
import shlex
import shutil
import subprocess
from collections import Counter

from slipstream.fleet.base import FleetError, Order, Room, Status
from slipstream.job.machines import Machines
from slipstream.plan import Machine
from slipstream.runs.folder import LAUNCHER_LOG

AGAIN = 75
"""Exit code of an agent that was warned of the end of its time: it has saved itself, and is to be queued again."""
SCRIPT = "slurm.sh"
_ON_THE_NODE = "/tmp/%x-%j.log"
"""Where the first node keeps what agents say, if it may not see the run's folder on this machine."""
_PATIENCE = 9.0
_BUSY = 60.0
"""Seconds for what must not be given up lightly: a job that was sent and not heard of would run for nobody."""
_FORGOTTEN = "Invalid job id"
"""What Slurm says of a job that ended some minutes ago."""
_QUEUED = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "SUSPENDED")
_RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING")


class SlurmFleet:
    """A Slurm cluster, by its commands on this machine. The run's folder must be on a disk that all nodes share, or in
    object storage."""

    def __init__(self, settings: Machines) -> None:
        self._settings = settings.slurm

    def validate(self, order: Order) -> None:
        fitting = [
            room
            for room in self.capacity(whole=True)
            if room.machine.cores >= order.cores and len(room.machine.gpus) >= order.gpus
        ]
        if not any(room.machines >= order.machines for room in fitting):
            wanted = f"{order.machines} nodes with {order.cores} cores" + (
                f" and {order.gpus} GPUs" if order.gpus else ""
            )
            raise FleetError(
                f"the cluster could never give {wanted}; `slipstream capacity --on slurm` shows what it has"
            )

    def capacity(self, whole: bool = False) -> list[Room]:
        """Idle nodes by kind and partition; the `whole` cluster also has those that are busy."""
        asked = _ask("sinfo", "--noheader", "--Node", "--format=%R|%N|%c|%m|%G|%T")
        counts: Counter[tuple[str, Machine]] = Counter()
        for line in sorted(set(asked.splitlines())):
            partition, _, cores, memory, gres, state = line.strip().split("|")
            machine = Machine("", int(cores), int(memory.rstrip("+")) * 2**20, _gpus(gres), bf16=True)
            usable = state.rstrip("*~#!%$@^-") in ("idle", *(("mixed", "allocated", "completing") if whole else ()))
            counts[partition.rstrip("*"), machine] += usable and not state.endswith("*")
        mine, partitions = self._settings.partition, sorted({name for name, _ in counts})
        if mine and mine not in partitions:
            raise FleetError(f"machines.slurm.partition: Slurm has no {mine!r}; it has {', '.join(partitions)}")
        return [Room(n, machine, name) for (name, machine), n in counts.items() if n and mine in (None, name)]

    def render(self, order: Order) -> str:
        slurm, options = self._settings, {"job-name": order.name, "nodes": order.machines, "ntasks-per-node": 1}
        output = _ON_THE_NODE if order.store else order.run / "logs" / LAUNCHER_LOG
        options |= {"cpus-per-task": order.cores, "output": output, "open-mode": "append"}
        for name in ("partition", "account", "qos", "constraint"):
            options |= {name: value} if (value := getattr(slurm, name)) else {}
        if gres := slurm.gres or (f"gpu:{order.gpus}" if order.gpus else None):
            options["gres"] = gres
        if seconds := slurm.time or order.seconds:
            options["time"] = _clock(seconds)
        options["signal"] = f"USR1@{round(slurm.warning)}"
        lines = [f"#SBATCH --{name}={value}" for name, value in options.items()]
        return "\n".join(
            [
                "#!/bin/bash",
                *lines,
                "#SBATCH --requeue",
                "",
                *slurm.setup,
                "# One agent on every node; when one fails, the others are ended too.",
                f"srun --kill-on-bad-exit=1 {order.written()}",
                "code=$?",
                f"# {AGAIN}: the time limit is near and the run has saved itself; it goes on when its turn comes.",
                f'if [ "$code" -eq {AGAIN} ]; then',
                '  scontrol requeue "$SLURM_JOB_ID" && sleep 60',
                "fi",
                'exit "$code"',
                "",
            ]
        )

    def launch(self, order: Order) -> str:
        script = order.run / SCRIPT
        script.write_text(self.render(order))
        return _ask("sbatch", "--parsable", str(script), patience=_BUSY).strip().partition(";")[0]

    def status(self, submission: str) -> Status:
        try:
            asked = _ask("squeue", "--noheader", "--states=all", f"--jobs={submission}", "--format=%T|%r")
        except FleetError as error:
            if _FORGOTTEN not in str(error):
                raise
            asked = ""
        state, _, reason = (asked.strip() or "forgotten|").splitlines()[0].partition("|")
        detail = f"{state.lower()} ({reason})" if reason not in ("", "None") else state.lower()
        if state in _QUEUED:
            return Status("queued", detail)
        return Status("running" if state in _RUNNING else "ended", detail)

    def logs(self, submission: str) -> str:  # noqa: ARG002
        return ""  # Slurm writes into the run's folder

    def stop(self, submission: str) -> None:
        if self.status(submission).state == "running":
            _ask("scontrol", "update", f"JobId={submission}", "Requeue=0")  # also if its time is nearly up
            _ask("scancel", "--signal=TERM", submission)  # to the agents, which save before they end
        else:
            _ask("scancel", submission)


def _ask(*words: str, patience: float = _PATIENCE) -> str:
    """One of Slurm's commands. Raises FleetError."""
    if not shutil.which(words[0]):
        raise FleetError(
            f"{words[0]} was not found: this machine has no Slurm; submit from a login node of the cluster"
        )
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=patience, check=False)
    except subprocess.TimeoutExpired:
        raise FleetError(f"{words[0]} has not answered in {patience:.0f} s: is Slurm's controller running?") from None
    if done.returncode:
        said = done.stderr.strip() or done.stdout.strip()
        raise FleetError(f"Slurm refuses: {said}\nasked by: {shlex.join(words)}")
    return done.stdout


def _gpus(gres: str) -> tuple[str, ...]:
    """`gpu:a100:4(S:0-1)` as four names."""
    found = re.findall(r"gpu(?::([A-Za-z][\w.-]*))?:(\d+)", gres)
    return tuple(kind or "gpu" for kind, count in found for _ in range(int(count)))


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02d}:{minutes:02d}:{rest:02d}" if days else f"{hours:02d}:{minutes:02d}:{rest:02d}"
