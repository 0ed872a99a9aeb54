"""What Kubernetes is sent for a run: an indexed Job, a headless Service by which its pods find the first of them, and a
Secret by which they know each other. Plain values, in the order in which they are made."""

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

from slipstream.fleet.base import FleetError, Order
from slipstream.fleet.failure import FINAL
from slipstream.fleet.place import ADDRESS, HEAD, TOKEN
from slipstream.job.machines import Kubernetes

PORT = 29400
"""Where the first pod waits for the others. Every pod has an address of its own, so it is always free."""
RUN = "slipstream/run"
"""The label of all that belongs to a run."""
KEPT = 7 * 86400
"""Seconds for which the cluster keeps a Job that has ended, with its log."""
INSTANCE = "node.kubernetes.io/instance-type"
_CLOUDS = {"gke": "gcp", "eks": "aws", "aks": "azure"}
_SPOT = {
    "gke": ("cloud.google.com/gke-spot", "true"),
    "eks": ("eks.amazonaws.com/capacityType", "SPOT"),
    "aks": ("kubernetes.azure.com/scalesetpriority", "spot"),
}
"""The label that spot nodes have with each provider; on some it is a taint as well."""
_CONTAINER = "agent"
_LONGEST = 63

Document = dict[str, Any]


def make_documents(order: Order, token: str) -> list[Document]:
    """All that makes up a run on a cluster."""
    settings, name = order.settings.kubernetes, job_name(order)
    about = {"name": name, "labels": {RUN: name, "app.kubernetes.io/managed-by": "slipstream"}}
    if settings.namespace:
        about["namespace"] = settings.namespace
    return [
        {"apiVersion": "v1", "kind": "Secret", "metadata": about, "type": "Opaque", "stringData": {TOKEN: token}},
        {"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": _service(name)},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": _queued(about, settings), "spec": _job(order, name)},
    ]


def job_name(order: Order) -> str:
    """Of the Job and what belongs to it: another one when a run is sent again."""
    return dns_name(f"{order.name}-again-{order.attempt}" if order.attempt else order.name, order.machines)


def dns_name(name: str, machines: int) -> str:
    """A run's name as Kubernetes wants it, with room for a pod's number behind it."""
    longest = _LONGEST - len(f"-{machines - 1}")
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    plain = plain if plain[:1].isalpha() else f"run-{plain}".rstrip("-")
    if len(plain) <= longest:
        return plain
    return f"{plain[: longest - 9].rstrip('-')}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def folder_of(order: Order) -> str:
    """The run folder, as the pods see it too. Raises FleetError where they would not."""
    if order.store:
        return order.store
    settings, run = order.settings.kubernetes, order.run.resolve()
    if not settings.mount:
        raise FleetError(
            "the pods would not see the run folder: set machines.store to an address in object storage; or "
            "machines.kubernetes.claim to a volume claim that all of them "
            "can write to (ReadWriteMany), and machines.kubernetes.mount to the folder where that volume is, in the "
            "pods and on this machine alike"
        )
    if not run.is_relative_to(settings.mount):
        raise FleetError(
            f"the run folder {run} is not below machines.kubernetes.mount, {settings.mount}, so the pods would not see "
            f"it; submit from a folder there, or name one: --run-dir {settings.mount}/runs/{order.name}"
        )
    return str(run)


def selector(settings: Kubernetes, offer: Mapping[str, Any], where: str = "") -> dict[str, str]:
    """The labels of nodes that will do. Raises FleetError where the plan is for another cloud."""
    labels = dict(settings.nodes)
    if where:
        key, _, value = where.partition("=")
        labels[key] = value
    if settings.autoscaling:
        labels |= _rented(settings, offer)
    if spot := _spot(settings, offer):
        labels[spot[0]] = spot[1]
    if settings.tpu:
        labels["cloud.google.com/gke-tpu-accelerator"] = settings.tpu.accelerator
        labels["cloud.google.com/gke-tpu-topology"] = settings.tpu.topology
    return labels


def tolerated(settings: Kubernetes, offer: Mapping[str, Any], gpus: bool) -> list[str]:
    """The keys of taints that are no hindrance: of GPUs, of TPUs, of spot nodes, and what the job says."""
    keys = [*settings.tolerate, *([settings.gpu] if gpus else []), *(["google.com/tpu"] if settings.tpu else [])]
    if spot := _spot(settings, offer):
        keys.append(spot[0])
    return list(dict.fromkeys(keys))


def _rented(settings: Kubernetes, offer: Mapping[str, Any]) -> dict[str, str]:
    """The nodes that the plan names."""
    assert settings.provider, "the job file was checked"
    cloud = _CLOUDS[settings.provider]
    if offer.get("cloud") != cloud:
        raise FleetError(
            f"the plan is for {offer.get('cloud')}, and machines.kubernetes.provider {settings.provider} has the "
            f"machines of {cloud}; plan for that: slipstream plan JOB --set limits.clouds={cloud} --save plan.yaml"
        )
    return {INSTANCE: offer["machine"], "topology.kubernetes.io/region": offer["region"]}


def _spot(settings: Kubernetes, offer: Mapping[str, Any]) -> tuple[str, str] | None:
    wanted = settings.autoscaling and bool(offer.get("spot")) if settings.spot is None else settings.spot
    return _SPOT[settings.provider] if wanted and settings.provider else None


def _queued(about: Document, settings: Kubernetes) -> Document:
    if not settings.queue:
        return about
    return {**about, "labels": {**about["labels"], "kueue.x-k8s.io/queue-name": settings.queue}}


def _service(name: str) -> Document:
    return {
        "clusterIP": "None",
        "selector": {RUN: name},
        "publishNotReadyAddresses": True,  # a pod must be found before it runs: that is how it begins
        "ports": [{"name": "head", "port": PORT}],
    }


def _job(order: Order, name: str) -> Document:
    settings, machines = order.settings.kubernetes, order.machines
    spec: Document = {
        "completions": machines,
        "parallelism": machines,
        "completionMode": "Indexed",
        # When one pod fails the others do too: they wait for each other. Then all are started again, and go on from
        # the checkpoint.
        "backoffLimit": settings.restarts * machines,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {
                    "action": "FailJob",  # to start it again would end the same way
                    "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": sorted(FINAL)},
                },
            ]
        },
        "ttlSecondsAfterFinished": KEPT,
        "template": {"metadata": {"labels": {RUN: name}}, "spec": _pod(order, name)},
    }
    if machines > 1:
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}  # the first one has the result
    return {**spec, "suspend": True} if settings.queue else spec


def _pod(order: Order, name: str) -> Document:
    settings = order.settings.kubernetes
    user = os.getuid() if settings.user is None else settings.user
    spec: Document = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": round(settings.grace),
        "securityContext": {"runAsUser": user, "runAsGroup": os.getgid() if settings.user is None else user},
        "containers": [_container(order, name)],
        "volumes": [
            *([{"name": "run", "persistentVolumeClaim": {"claimName": settings.claim}}] if settings.claim else []),
            {"name": "shared-memory", "emptyDir": _in_memory(settings)},
        ],
    }
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    if settings.pull_secret:
        spec["imagePullSecrets"] = [{"name": settings.pull_secret}]
    if labels := selector(settings, order.offer, order.where):
        spec["nodeSelector"] = labels
    if taints := tolerated(settings, order.offer, bool(order.gpus)):
        spec["tolerations"] = [{"key": key, "operator": "Exists"} for key in taints]
    return spec


def _in_memory(settings: Kubernetes) -> Document:
    """Workers of a machine hand each other tensors in /dev/shm, and a container's own has 64 MB."""
    limit = {"sizeLimit": str(settings.shared_memory)} if settings.shared_memory else {}
    return {"medium": "Memory", **limit}


def _container(order: Order, name: str) -> Document:
    settings = order.settings.kubernetes
    secrets = [{"secretRef": {"name": each}} for each in (name, *settings.secrets)]
    return {
        "name": _CONTAINER,
        "image": settings.image,
        "command": [*order.command("python")[:-1], folder_of(order)],
        "env": [
            {"name": HEAD, "value": f"{name}-0.{name}:{PORT}"},
            {"name": ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "HOME", "value": "/tmp"},  # the image knows nothing of this user, who must write somewhere
        ],
        "envFrom": secrets,
        "resources": _resources(order),
        "volumeMounts": [
            *([{"name": "run", "mountPath": settings.mount}] if settings.mount else []),
            {"name": "shared-memory", "mountPath": "/dev/shm"},
        ],
        "securityContext": {"allowPrivilegeEscalation": False},
    }


def _resources(order: Order) -> Document:
    """CPUs have no limit: who has one is held back although others are idle. Beside GPUs fewer are asked for than will
    be used: a node keeps some for itself, and it is GPUs that pods must not share."""
    settings = order.settings.kubernetes
    cores = order.cores * 1000 * 3 // 4 if order.gpus else order.cores * 1000
    limits: dict[str, str] = {}
    if order.gpus:
        limits[settings.gpu] = str(order.gpus)
    if settings.tpu:
        limits["google.com/tpu"] = str(settings.tpu.chips)
    if settings.memory:
        limits["memory"] = str(settings.memory)
    return {"requests": {"cpu": f"{cores}m", **limits}, **({"limits": limits} if limits else {})}
