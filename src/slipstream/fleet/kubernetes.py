"""The fleet `kubernetes`: an indexed Job with a pod for each machine, through the official client."""

import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import yaml

from slipstream.fleet.base import FleetError, Order, Rents, Room, Status
from slipstream.fleet.cluster import Cluster
from slipstream.fleet.manifests import INSTANCE, RUN, folder_of, job_name, make_documents, selector, tolerated
from slipstream.job.machines import Machines
from slipstream.plan import Machine
from slipstream.plan.accelerators import Accelerator, find_accelerator
from slipstream.plan.offers import load_offers

MANIFEST = "kubernetes.yaml"
_PULLING = {"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"}
_BROKEN = {"CreateContainerConfigError", "CreateContainerError", "RunContainerError"}
_KINDS = ("nvidia.com/gpu.product", "cloud.google.com/gke-accelerator", INSTANCE)
"""Labels that tell nodes apart, the one that says most of GPUs first."""


class KubernetesFleet:
    """A cluster, by a kubeconfig or from a pod in it. A submission is known as `namespace/job@context`."""

    def __init__(self, settings: Machines) -> None:
        self._settings = settings.kubernetes
        self._token = secrets.token_hex(16)
        """The same in all that this object makes of a run: what was shown is what is sent."""

    def validate(self, order: Order) -> None:
        if not self._settings.image:
            raise FleetError(
                "the pods need an image with slipstream in it: set machines.kubernetes.image (container/Dockerfile in "
                "slipstream's sources makes one)"
            )
        if self._settings.tpu and order.gpus:
            raise FleetError("a pod has GPUs or TPUs, and this job computes on GPUs; leave out machines.kubernetes.tpu")
        folder_of(order)
        selector(self._settings, order.offer)
        self._cluster().refuse_if_no_namespace()
        if not self._settings.autoscaling:
            self._refuse_if_too_small(order)

    def _refuse_if_too_small(self, order: Order) -> None:
        rooms = [
            room
            for room in self.capacity(whole=True)
            if room.where == order.where and room.machine.cores >= order.cores and len(room.machine.gpus) >= order.gpus
        ]
        if sum(room.machines for room in rooms) < order.machines:
            gpus = f" and {order.gpus} GPUs" if order.gpus else ""
            raise FleetError(
                f"the cluster could never give {order.machines} nodes with {order.cores} cores{gpus}; `slipstream "
                "capacity --on kubernetes --job JOB` shows what is free; if it adds nodes by itself, set "
                "machines.kubernetes.autoscaling: true"
            )

    def capacity(self, whole: bool = False) -> list[Room]:
        """What nodes have left beside the pods on them, by kind; `whole`: beside those that every node has."""
        if self._settings.autoscaling:
            raise Rents("with machines.kubernetes.autoscaling the cluster gets the machines that are asked for")
        cluster, gpu = self._cluster(), self._settings.gpu
        wanted, passed = selector(self._settings, {}), tolerated(self._settings, {}, gpus=True)
        nodes = [node for node in cluster.nodes() if _usable(node, wanted, passed)]
        taken = _taken(cluster.pods_everywhere(), gpu, only_everywhere=whole)
        kinds: dict[tuple[str, int, tuple[str, ...]], list[int]] = defaultdict(list)
        for node in nodes:
            cores, memory, gpus = _left(node, taken[node["metadata"]["name"]], gpu)
            if cores >= 1 and memory > 0:
                labels = node["metadata"].get("labels") or {}
                kind = next((f"{key}={labels[key]}" for key in _KINDS if key in labels), "")
                kinds[kind, cores, (_gpu_name(labels),) * gpus if gpus else ()].append(memory)
        return [
            Room(len(found), _machine(cores, min(found), gpus), kind)
            for (kind, cores, gpus), found in sorted(kinds.items())
        ]

    def render(self, order: Order) -> str:
        name = job_name(order)
        into = f" -n {self._settings.namespace}" if self._settings.namespace else ""
        return (
            f"# The run {folder_of(order)}, on {order.machines} machines.\n"
            f"# By hand: kubectl apply{into} -f {MANIFEST}; it goes on from its last checkpoint.\n"
            f"# To stop it, with a checkpoint: kubectl delete{into} job,service,secret -l {RUN}={name}\n"
            + yaml.safe_dump_all(make_documents(order, self._token), sort_keys=False)
        )

    def launch(self, order: Order) -> str:
        text = self.render(order)
        manifest = order.run / MANIFEST
        manifest.touch(mode=0o600)  # a secret is in it
        manifest.write_text(text)
        cluster = self._cluster()
        made: list[dict[str, Any]] = []
        try:
            for document in yaml.safe_load_all(text):
                made.append(cluster.create(document))  # noqa: PERF401 - what there is must be known if the next fails
            cluster.give_to(made[-1], made[:-1])
        except BaseException:
            for document in reversed(made):
                with suppress(FleetError):
                    cluster.delete(document["kind"], document["metadata"]["name"])
            raise
        return cluster.written(made[-1]["metadata"]["name"])

    def status(self, submission: str) -> Status:
        cluster, name = self._known(submission)
        job = cluster.job(name)
        if job is None:
            return Status("ended", "the cluster has it no more")
        said = job.get("status") or {}
        for condition in said.get("conditions") or []:
            if condition["type"] in ("Complete", "Failed") and condition["status"] == "True":
                return Status("ended", _sentence(condition["type"].lower(), condition))
        if job["metadata"].get("deletionTimestamp"):
            return Status("running", "its pods are saving and ending")
        if job["spec"].get("suspend"):
            return Status("queued", f"waiting in queue {self._settings.queue}" if self._settings.queue else "suspended")
        pods = cluster.pods(name)
        if trouble := next(filter(None, map(_trouble, pods)), None):
            return Status("queued", trouble)
        running = sum(pod["status"].get("phase") in ("Running", "Succeeded") for pod in pods)
        machines = job["spec"]["completions"]
        return Status("running" if running >= machines else "queued", f"{running} of {machines} pods run")

    def logs(self, submission: str) -> str:
        cluster, name = self._known(submission)
        texts = []
        for pod in sorted(cluster.pods(name), key=lambda pod: str(pod["metadata"]["name"])):
            number = (pod["metadata"].get("annotations") or {}).get("batch.kubernetes.io/job-completion-index", "?")
            texts += [f"pod {number}: {line}" for line in cluster.log(pod["metadata"]["name"]).splitlines()]
        return "".join(f"{line}\n" for line in texts)

    def stop(self, submission: str) -> None:
        """Its pods are told to end, and have `grace` for a checkpoint; they are not started again."""
        cluster, name = self._known(submission)
        cluster.delete("Job", name)

    def _cluster(self, context: str | None = None, namespace: str | None = None) -> Cluster:
        return Cluster(context or self._settings.context, namespace or self._settings.namespace)

    def _known(self, submission: str) -> tuple[Cluster, str]:
        path, _, context = submission.partition("@")
        namespace, _, name = path.partition("/")
        return self._cluster(context, namespace), name


def _sentence(state: str, condition: dict[str, Any]) -> str:
    why = ": ".join(filter(None, [condition.get("reason"), condition.get("message")]))
    return f"{state} ({why})" if why else state


def _trouble(pod: dict[str, Any]) -> str | None:
    """Why a pod does not start, if that will not pass by itself, or while it waits for a node."""
    name, status = pod["metadata"]["name"], pod["status"]
    for container in status.get("containerStatuses") or []:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, message = waiting.get("reason"), waiting.get("message") or ""
        if reason in _PULLING:
            return (
                f"{reason}: pod {name} cannot get the image {container['image']}: {message}; is its name right, and "
                "does machines.kubernetes.pull_secret hold the registry's password? `slipstream stop` takes it back"
            )
        if reason in _BROKEN:
            return f"{reason}: pod {name} cannot start: {message}; `slipstream stop` takes it back"
    for condition in status.get("conditions") or []:
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"pod {name} waits for a node: {condition.get('message') or condition.get('reason')}"
    return None


def _usable(node: dict[str, Any], wanted: dict[str, str], passed: Sequence[str]) -> bool:
    """Whether pods of ours can come to a node."""
    labels, spec = node["metadata"].get("labels") or {}, node.get("spec") or {}
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)
    taints = {each["key"] for each in spec.get("taints") or [] if each["effect"] in ("NoSchedule", "NoExecute")}
    fits = all(labels.get(key) == value for key, value in wanted.items())
    return ready and fits and not spec.get("unschedulable") and taints <= set(passed)


Amounts = dict[str, float]


def _taken(pods: Iterable[dict[str, Any]], gpu: str, only_everywhere: bool) -> dict[str, Amounts]:
    """What the pods of each node have asked for. Those that belong to the node itself are never gone."""
    taken: dict[str, Amounts] = defaultdict(lambda: defaultdict(float))
    for pod in pods:
        node, owners = pod["spec"].get("nodeName"), pod["metadata"].get("ownerReferences") or []
        everywhere = any(owner["kind"] in ("DaemonSet", "Node") for owner in owners)
        if not node or pod["status"].get("phase") in ("Succeeded", "Failed") or (only_everywhere and not everywhere):
            continue
        for container in pod["spec"]["containers"]:
            asked = (container.get("resources") or {}).get("requests") or {}
            for what in ("cpu", "memory", gpu):
                taken[node][what] += _amount(asked.get(what, "0"))
    return taken


def _left(node: dict[str, Any], taken: Amounts, gpu: str) -> tuple[int, int, int]:
    """Cores, bytes and GPUs."""
    there = node["status"]["allocatable"]
    cores, memory, gpus = (_amount(there.get(what, "0")) - taken[what] for what in ("cpu", "memory", gpu))
    return int(cores), int(memory), int(gpus)


def _amount(written: str) -> float:
    """`500m`, `16Gi`, `8`: a number."""
    from kubernetes.utils import quantity

    parse: Callable[[str], Any] = quantity.parse_quantity
    return float(parse(written))


def _gpu_name(labels: dict[str, str]) -> str:
    """Of a node's GPUs, as our tables name them, else as the node does."""
    told = next((labels[key] for key in _KINDS[:2] if key in labels), None)
    if told is None:
        machine = labels.get(INSTANCE)
        return next((offer.accelerator.name for offer in load_offers() if offer.machine == machine), "gpu")
    known = _accelerator(told)
    return known.name if known else told


def _accelerator(name: str) -> Accelerator | None:
    with suppress(ValueError):
        return find_accelerator(name)
    return None


def _machine(cores: int, memory: int, gpus: tuple[str, ...]) -> Machine:
    known = _accelerator(gpus[0]) if gpus else None
    peaks = known.peaks if known else {"bf16": 0.0}  # of what we do not know, what all newer GPUs have
    return Machine("", cores, memory, gpus, "bf16" in peaks, "fp8" in peaks)
