"""The fleet `skypilot`: a managed job on rented machines, which SkyPilot finds, recovers and takes down."""

import io
import os
import re
import secrets
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from slipstream.fleet.base import FleetError, Order, Rents, Room, Status
from slipstream.fleet.failure import FINAL, INTERRUPTED
from slipstream.fleet.place import ADDRESS, HEAD, TOKEN
from slipstream.job.base import nearest
from slipstream.job.machines import Machines
from slipstream.plan.accelerators import accelerators
from slipstream.runs import RunFolder

TASK = "skypilot.yaml"
PORT = 29400
"""Where the first machine waits for the others."""
IDLE_MINUTES = 10
"""After which machines take themselves down, should whoever watches over them be gone."""
CLOUDS = (
    "aws", "azure", "cudo", "do", "fluidstack", "gcp", "hyperbolic", "ibm", "lambda", "nebius", "oci", "paperspace",
    "primeintellect", "runpod", "scp", "seeweb", "shadeform", "vast", "verda", "yotta",
)  # fmt: skip
"""Of those in our table of offers the ones that SkyPilot rents from; both call them the same, and machines too."""
_WAITING = ("PENDING", "SUBMITTED", "STARTING", "RECOVERING")
_RUNNING = ("RUNNING", "WINDING_DOWN", "CANCELLING")


class SkyPilotFleet:
    """Clouds, by SkyPilot's API server. A submission is known as `number@folder`."""

    def __init__(self, settings: Machines) -> None:
        self._settings = settings.skypilot
        self._token = secrets.token_hex(16)
        """The same in all that this object makes of a run: what was shown is what is sent."""

    def validate(self, order: Order) -> None:
        if not (self._settings.image or self._settings.setup):
            raise FleetError(
                "the machines need slipstream: set machines.skypilot.image to one that has it (container/Dockerfile"
                " in slipstream's sources makes one), or install it by the lines of machines.skypilot.setup"
            )
        _refuse_unknown(order)
        self._folder(order)
        for name in self._settings.secrets:
            if name not in os.environ:
                raise FleetError(f"machines.skypilot.secrets names {name}, which the environment here does not have")
        with _asking() as sky:
            task = sky.Task.from_yaml_config(self._task(order))
            _refuse_unsupported(sky, task)

    def capacity(self, whole: bool = False) -> list[Room]:  # noqa: ARG002
        raise Rents("SkyPilot rents the machines that are asked for, and `slipstream offers` lists them")

    def render(self, order: Order) -> str:
        return (
            f"# The run {self._folder(order)}, as a managed job: sky jobs launch {TASK}\n"
            + (f"# {order.price}\n" if order.price else "")
            + "# SkyPilot takes the machines down when the job ends, fails or is cancelled.\n"
            + yaml.dump(self._task(order), Dumper=_Dumper, sort_keys=False, allow_unicode=True)
        )

    def launch(self, order: Order) -> str:
        text = self.render(order)
        task = order.run / TASK
        task.touch(mode=0o600)  # a secret is in it
        task.write_text(text)
        with _asking() as sky:
            _refuse_without_access(sky, order.offer["cloud"])
            asked = sky.jobs.launch(sky.Task.from_yaml_config(yaml.safe_load(text)), name=order.name)
            try:
                numbers, _ = sky.stream_and_get(asked)
            except KeyboardInterrupt:
                sky.api_cancel(asked)
                raise
            if not numbers:
                raise FleetError("SkyPilot has taken the job, but did not say under which number")
            return f"{numbers[0]}@{order.run}"

    def status(self, submission: str) -> Status:
        number = _number(submission)
        with _asking() as sky:
            try:
                found = sky.get(sky.jobs.queue_v2(refresh=False, job_ids=[number]))[0]
            except sky.exceptions.ClusterNotUpError:  # its own machine, which goes when nothing is left to watch over
                found = []
        if not found:
            return Status("ended", "SkyPilot knows it no more")
        state = str(getattr(found[0]["status"], "value", found[0]["status"]))
        why = found[0].get("failure_reason")
        detail = f"{state.lower()} ({why})" if why else state.lower()
        if state in _WAITING:
            return Status("queued", detail)
        return Status("running" if state in _RUNNING else "ended", detail)

    def logs(self, submission: str) -> str:
        text = io.StringIO()
        with _asking() as sky:
            sky.jobs.tail_logs(job_id=_number(submission), follow=False, output_stream=text)
        return text.getvalue()

    def stop(self, submission: str) -> None:
        """SkyPilot leaves no time for a checkpoint, so who runs is asked through the run's folder, and ends."""
        if self.status(submission).state == "running":
            RunFolder(Path(submission.partition("@")[2])).wish_to_stop()
            return
        with _asking() as sky:
            sky.get(sky.jobs.cancel(job_ids=[_number(submission)]))

    def _folder(self, order: Order) -> str:
        """The run folder, as the machines see it too. Raises FleetError where they would not."""
        if order.store:
            return order.store
        run, shared = order.run.resolve(), self._settings.shared
        if not shared:
            raise FleetError(
                "the machines would not see the run folder: set machines.store to an address in object storage; or "
                "machines.skypilot.shared to a folder that they and "
                "this machine see alike, such as an NFS export which machines.skypilot.setup mounts"
            )
        if not run.is_relative_to(shared):
            raise FleetError(
                f"the run folder {run} is not below machines.skypilot.shared, {shared}, so the machines would not see "
                f"it; submit from a folder there, or name one: --run-dir {shared}/runs/{order.name}"
            )
        return str(run)

    def _task(self, order: Order) -> dict[str, Any]:
        settings, offer = self._settings, order.offer
        resources = {
            "cloud": offer["cloud"],
            "region": offer["region"],
            "instance_type": offer["machine"],
            "use_spot": bool(offer.get("spot")),
            "autostop": {"idle_minutes": IDLE_MINUTES, "down": True},
            "job_recovery": {"max_restarts_on_errors": settings.restarts},
        }
        if settings.image:
            resources["image_id"] = f"docker:{settings.image}"
        if settings.disk:
            resources["disk_size"] = -(-settings.disk // 2**30)
        task = {
            "name": order.name,
            "num_nodes": order.machines,
            "resources": resources,
            "secrets": {TOKEN: self._token, **{name: os.environ[name] for name in settings.secrets}},
            "run": self._script(order),
        }
        if settings.setup:
            task["setup"] = "\n".join(settings.setup) + "\n"
        if settings.volume:
            task["volumes"] = {settings.shared: settings.volume}
        return task

    def _script(self, order: Order) -> str:
        command = shlex.join([*order.command("python")[:-1], self._folder(order)])
        final = "|".join(map(str, sorted((*FINAL, INTERRUPTED))))
        return "\n".join(
            [
                "# One agent on every machine; they find the first of them.",
                f'export {HEAD}="$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p):{PORT}"',
                f'export {ADDRESS}="$(echo "$SKYPILOT_NODE_IPS" | sed -n "$((SKYPILOT_NODE_RANK + 1))p")"',
                command,
                "code=$?",
                "# Refused, at a limit, not finite or stopped: SkyPilot is not to start that again. What came of it is",
                "# in the run's folder.",
                f'case "$code" in {final}) exit 0 ;; esac',
                'exit "$code"',
                "",
            ]
        )


def _number(submission: str) -> int:
    return int(submission.partition("@")[0])


def _refuse_unknown(order: Order) -> None:
    cloud = str(order.offer.get("cloud"))
    if cloud not in CLOUDS:
        raise FleetError(
            f"SkyPilot rents nothing from {cloud}{nearest(cloud, CLOUDS)}; plan on clouds that it knows: --set "
            f"limits.clouds={','.join(CLOUDS[:3])},… ({', '.join(CLOUDS)})"
        )
    known = accelerators().get(str(order.offer.get("accelerator")))
    if known and known.kind == "tpu":
        raise FleetError(f"{known.name} is a TPU, and runs need GPUs; plan on those: --set limits.gpus=H100,A100")


def _refuse_unsupported(sky: Any, task: Any) -> None:
    """What a cloud cannot do SkyPilot knows before anything is rented."""
    can = sky.clouds.CloudImplementationFeatures
    for resources in task.resources:
        wanted = {can.MULTI_NODE} if task.num_nodes > 1 else set()
        wanted |= {can.DOCKER_IMAGE} if resources.image_id else set()
        wanted |= {can.SPOT_INSTANCE} if resources.use_spot else set()
        resources.cloud.check_features_are_supported(resources, wanted)


def _refuse_without_access(sky: Any, cloud: str) -> None:
    """Its own machine, which watches over jobs, SkyPilot would rent on any cloud; we mean one."""
    from sky.client import sdk
    from sky.server import common

    refusal = f"SkyPilot has no access to {cloud}; `sky check {cloud}` says what is missing"
    known = sky.CLOUD_REGISTRY.from_str(cloud)
    if common.is_api_server_local():  # it has our credentials, and to start it takes a minute
        ok, why = known.check_credentials(sky.clouds.cloud.CloudCapability.COMPUTE)
        if not ok:
            raise FleetError(f"{refusal}: {_plain(why)}")
    found = sky.get(sdk.check(infra_list=(cloud,), verbose=False))
    if not any("compute" in clouds.get(str(known), ()) for clouds in found.values()):
        raise FleetError(refusal)


@contextmanager
def _asking() -> Iterator[Any]:
    """SkyPilot, whose errors become ours."""
    os.environ.setdefault("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")  # nobody was asked whether he agrees to it
    try:
        import sky
    except ImportError as error:
        raise FleetError("SkyPilot is not installed: pip install 'slipstream[skypilot]'") from error
    try:
        yield sky
    except FleetError:
        raise
    except sky.exceptions.ApiServerConnectionError as error:
        raise FleetError(f"{_plain(error)}; is SKYPILOT_API_SERVER_ENDPOINT right?") from error
    except sky.exceptions.NotSupportedError as error:
        raise FleetError(f"{_plain(error)}\nplan on another cloud (limits.clouds), or leave that out") from error
    except Exception as error:  # of any kind, from SkyPilot or the cloud behind it
        raise FleetError(f"SkyPilot refuses: {type(error).__name__}: {_plain(error)}") from error


def _plain(error: object) -> str:
    """Without the colours of a terminal."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()


class _Dumper(yaml.SafeDumper):
    """Scripts as they are, line by line."""


def _written(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _written)
