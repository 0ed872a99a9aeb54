"""The fleet kubernetes: its manifests by Kubernetes' own schemas and the official client, and whole runs on a stand-in
for a cluster, whose pods are processes."""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from kubernetes import client

from cluster import Cluster
from jobs import merge, mlp_job
from program import slipstream, write_job
from slipstream.fleet.base import Order
from slipstream.fleet.kubernetes import KubernetesFleet
from slipstream.fleet.manifests import dns_name
from slipstream.job.machines import Machines

GPUS = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "node.kubernetes.io/instance-type": "p5.48xlarge"}


def node(name: str, cpu: str, gpus: int = 0, **more: Any) -> dict[str, Any]:
    labels = {"kubernetes.io/hostname": name, **(GPUS if gpus else {}), **more.pop("labels", {})}
    there = {"cpu": cpu, "memory": "64Gi", "pods": "110"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    status = {"allocatable": there, "conditions": [{"type": "Ready", "status": more.pop("ready", "True")}]}
    return {"metadata": {"name": name, "labels": labels}, "spec": more, "status": status}


def other(node: str, cpu: str, gpus: int = 0, owner: str = "ReplicaSet", phase: str = "Running") -> dict[str, Any]:
    """A pod of somebody else."""
    asked = {"cpu": cpu, "memory": "1Gi"} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    owners = [{"apiVersion": "apps/v1", "kind": owner, "name": "x", "uid": "u"}]
    containers = [{"name": "c", "image": "x", "resources": {"requests": asked}}]
    spec = {"nodeName": node, "containers": containers}
    return {"metadata": {"name": "p", "ownerReferences": owners}, "spec": spec, "status": {"phase": phase}}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that stands for a volume which all pods and we see."""
    return tmp_path_factory.mktemp("volume")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path, [node("a", "1"), node("b", "1")])
    monkeypatch.setenv("KUBECONFIG", str(cluster.config(tmp_path / "config")))
    yield cluster
    cluster.close()


def settings(place: Path, **changes: Any) -> dict[str, Any]:
    return {"image": "registry/slipstream:1", "claim": "runs", "mount": str(place), **changes}


def job_file(folder: Path, place: Path, steps: int = 30, **changes: Any) -> Path:
    values = mlp_job(**{"train.steps": steps, "checkpoint.every": 10}).model_dump(mode="json", exclude_defaults=True)
    return write_job(folder, merge(values, {"machines": {"count": 2, "kubernetes": settings(place, **changes)}}))


def order(place: Path, gpus: int = 0, machines: int = 2, where: str = "", **changes: Any) -> Order:
    asked = Machines.model_validate({"kubernetes": settings(place, **changes)})
    offer = {"cloud": "gcp", "machine": "a3-highgpu-8g", "region": "us-central1", "spot": True}
    return Order(place / "runs" / "Some.Run_1", machines, 4, gpus, asked, offer=offer, where=where)


CASES: dict[str, dict[str, Any]] = {
    "cpu": {},
    "one machine": {"machines": 1},
    "gpus of one kind": {"gpus": 8, "where": "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"},
    "all": {
        "gpus": 8, "provider": "gke", "autoscaling": True, "namespace": "team", "secrets": ["s3", "hf"],
        "service_account": "trainer", "pull_secret": "registry", "nodes": {"disk": "fast"}, "tolerate": ["dedicated"],
        "memory": "400GB", "shared_memory": "64GiB", "queue": "research", "user": 1000, "restarts": 3, "grace": "5m",
    },
    "eks spot": {"gpus": 8, "provider": "eks", "spot": True},
    "aks spot": {"gpus": 1, "provider": "aks", "spot": True, "gpu": "amd.com/gpu"},
    "tpu": {
        "provider": "gke", "tpu": {"accelerator": "tpu-v5-lite-podslice", "topology": "2x4", "chips": 4}, "spot": True
    },
}  # fmt: skip
MODELS = {"Secret": "V1Secret", "Service": "V1Service", "Job": "V1Job"}


def documents(asked: Order) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(KubernetesFleet(asked.settings).render(asked)))


@pytest.mark.parametrize("case", CASES)
def test_manifests_are_valid_and_pass_through_the_official_client(case: str, tmp_path: Path) -> None:
    found = documents(order(tmp_path, **CASES[case]))
    assert [document["kind"] for document in found] == list(MODELS)
    api = client.ApiClient(client.Configuration(host="http://nowhere"))
    for document in found:
        kubernetes_validate.validate(document, "1.33", strict=True)
        answer = type("Answer", (), {"data": json.dumps(document)})
        model = _deserialize(api, document, MODELS[document["kind"]], answer)
        assert api.sanitize_for_serialization(model) == document


def _deserialize(api: client.ApiClient, document: dict[str, Any], model: str, answer: Any) -> Any:
    kind = getattr(client, model)
    return kind.from_dict(document) if hasattr(kind, "from_dict") else api.deserialize(answer, model)


def test_a_misspelt_field_would_be_found(tmp_path: Path) -> None:
    job = documents(order(tmp_path))[2]
    job["spec"]["template"]["spec"]["subDomain"] = "x"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.33", strict=True)


def test_what_is_asked_for(tmp_path: Path) -> None:
    secret, service, job = documents(order(tmp_path, **CASES["all"]))
    name = "some-run-1"
    assert {each["metadata"]["name"] for each in (secret, service, job)} == {name}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["backoffLimit"] == 6
    assert spec["suspend"] and job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert pod["subdomain"] == name and pod["terminationGracePeriodSeconds"] == 300
    assert pod["nodeSelector"] == {
        "disk": "fast",
        "node.kubernetes.io/instance-type": "a3-highgpu-8g",
        "topology.kubernetes.io/region": "us-central1",
        "cloud.google.com/gke-spot": "true",
    }
    assert {each["key"] for each in pod["tolerations"]} == {"dedicated", "nvidia.com/gpu", "cloud.google.com/gke-spot"}
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "memory": "400000000000"}
    assert container["resources"]["requests"] == {"cpu": "3000m", **container["resources"]["limits"]}
    assert [each["secretRef"]["name"] for each in container["envFrom"]] == [name, "s3", "hf"]
    assert {"name": "SLIPSTREAM_HEAD", "value": f"{name}-0.{name}:29400"} in container["env"]
    assert pod["volumes"][1]["emptyDir"] == {"medium": "Memory", "sizeLimit": str(64 * 2**30)}
    assert container["command"][-1] == str(tmp_path / "runs" / "Some.Run_1")


def test_spot_and_tpu_nodes_by_provider(tmp_path: Path) -> None:
    def nodes(case: str) -> dict[str, str]:
        found: dict[str, str] = documents(order(tmp_path, **CASES[case]))[2]["spec"]["template"]["spec"]["nodeSelector"]
        return found

    assert nodes("eks spot") == {"eks.amazonaws.com/capacityType": "SPOT"}
    assert nodes("aks spot") == {"kubernetes.azure.com/scalesetpriority": "spot"}
    assert nodes("tpu") == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5-lite-podslice",
        "cloud.google.com/gke-tpu-topology": "2x4",
        "cloud.google.com/gke-spot": "true",
    }
    assert nodes("gpus of one kind") == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}


@pytest.mark.parametrize("name", ["a", "9-lives", "A_b.C", "x" * 80, "x" * 79 + "-", "..."])
def test_names_are_as_kubernetes_wants_them(name: str) -> None:
    written = dns_name(name, 1000)
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", written) and len(f"{written}-999") <= 63
    assert dns_name(f"{name}x", 1000) != written


def test_a_run_from_submit_to_its_end(cluster: Cluster, place: Path, tmp_path: Path) -> None:
    """What was shown is what is sent; pods find each other by it. One is killed, later a worker, and the run goes
    on to its end."""
    job = job_file(tmp_path, place, steps=1500)
    shown = slipstream("submit", job, "--on", "kubernetes", "--dry-run", cwd=place)
    assert shown.returncode == 0, shown.stderr
    assert not cluster.sent and not (place / "runs").exists()

    sent = slipstream("submit", job, "--on", "kubernetes", cwd=place)
    assert sent.returncode == 0, sent.stderr
    assert "as team/mlp-1@test" in sent.stdout
    run = place / "runs" / "mlp-1"
    assert cluster.sent == list(yaml.safe_load_all((run / "kubernetes.yaml").read_text()))
    assert oct((run / "kubernetes.yaml").stat().st_mode)[-3:] == "600"

    _until(lambda: (run / "metrics.jsonl").exists() and len((run / "metrics.jsonl").read_text().splitlines()) >= 12)
    os.killpg(cluster.pods["mlp-1"][1].process.pid, signal.SIGKILL)
    _until(lambda: (run / "events.jsonl").read_text().count('"launch"') == 2)
    before = len((run / "metrics.jsonl").read_text().splitlines())
    _until(lambda: len((run / "metrics.jsonl").read_text().splitlines()) > before + 20)
    os.kill(worker_of(cluster.pods["mlp-1"][1].process.pid), signal.SIGKILL)
    watched = slipstream("attach", run, cwd=place, timeout=120)
    assert watched.returncode == 0, watched.stdout + watched.stderr + _logs(cluster)
    assert (run / "events.jsonl").read_text().count('"launch"') == 3
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 1501))
    said = slipstream("logs", run, cwd=place)
    assert "pod 0: " in said.stdout, said.stdout
    listed = json.loads(slipstream("jobs", "--json", cwd=place).stdout)
    assert [(row["fleet"], row["status"]) for row in listed] == [("kubernetes", "finished")]
    # What belongs to the job goes with it.
    cluster.delete(("team", "jobs", "mlp-1"))
    _until(lambda: not cluster.things)


def test_stop_leaves_a_checkpoint_and_nothing_else(cluster: Cluster, place: Path, tmp_path: Path) -> None:
    job = job_file(tmp_path, place, steps=1_000_000)
    folder = place / "stopped"
    assert slipstream("submit", job, "--on", "kubernetes", "--run-dir", folder, cwd=place).returncode == 0
    _until(lambda: (folder / "metrics.jsonl").exists())
    asked = slipstream("stop", folder, cwd=place)
    assert asked.returncode == 0, asked.stderr
    _until(lambda: not cluster.things)
    assert all(pod.process.poll() is not None for pod in cluster.pods["stopped"])
    result = json.loads((folder / "result.json").read_text())
    assert (result["status"], result["reason"]) == ("stopped", "interrupted")
    assert any((folder / "checkpoints").iterdir())
    again = slipstream("stop", folder, cwd=place)
    assert again.returncode == 2 and "is not running" in again.stderr


def test_one_that_has_failed_goes_on_beside_what_is_left_of_it(cluster: Cluster, place: Path, tmp_path: Path) -> None:
    job, folder = job_file(tmp_path, place, steps=2000, restarts=0), place / "failed"
    assert slipstream("submit", job, "--on", "kubernetes", "--run-dir", folder, cwd=place).returncode == 0
    _until(lambda: any(folder.glob("checkpoints/*/manifest.json")))
    os.killpg(cluster.pods["failed"][1].process.pid, signal.SIGKILL)
    assert slipstream("attach", folder, cwd=place).returncode == 3
    again = slipstream("resume", folder, "--on", "kubernetes", cwd=place)
    assert again.returncode == 0, again.stdout + again.stderr
    assert ("team", "jobs", "failed") in cluster.things, "its log can still be read"
    watched = slipstream("attach", folder, cwd=place, timeout=120)
    assert watched.returncode == 0, watched.stdout + watched.stderr + _logs(cluster)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 2001))
    assert json.loads((folder / "submission.json").read_text())["id"] == "team/failed-again-1@test"


def test_an_image_that_is_not_there_is_said(cluster: Cluster, place: Path, tmp_path: Path) -> None:
    cluster.trouble = {"reason": "ImagePullBackOff", "message": "manifest unknown"}
    here = place / "image"
    here.mkdir()
    job = job_file(tmp_path, place)
    assert slipstream("submit", job, "--on", "kubernetes", cwd=here).returncode == 0
    (row,) = json.loads(slipstream("jobs", "--json", cwd=here).stdout)
    assert all(part in row["status"] for part in ("ImagePullBackOff", "registry/slipstream:1", "manifest unknown"))
    assert slipstream("stop", "mlp-1", cwd=here).returncode == 0
    _until(lambda: not cluster.things)


def worker_of(agent: int) -> int:
    """A process below an agent's that has none below itself."""
    below = [int(word) for word in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
    return worker_of(below[0]) if below else agent


def _until(true: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _logs(cluster: Cluster) -> str:
    return "\n".join(pod.log.read_text() for pods in cluster.pods.values() for pod in pods)


def refused(job: Path, place: Path, *words: str | Path) -> str:
    """What is said where the fleet cannot take it, with nothing left."""
    folder = place / "refused"
    done = slipstream("submit", job, "--on", "kubernetes", "--run-dir", folder, *words, cwd=place)
    assert done.returncode == 8, done.stdout + done.stderr
    assert not folder.exists()
    return done.stderr


def test_what_stands_in_the_way_is_said(
    cluster: Cluster, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_file(tmp_path, place)
    assert "KUBECONFIG" in _with(monkeypatch, tmp_path / "none", lambda: refused(job, place))
    (tmp_path / "broken").write_text("bad: [")
    assert "cannot be read" in _with(monkeypatch, tmp_path / "broken", lambda: refused(job, place))
    wrong = cluster.config(tmp_path / "wrong", token="guessed")
    assert "does not accept these credentials" in _with(monkeypatch, wrong, lambda: refused(job, place))
    closed = cluster.config(tmp_path / "closed", server="http://127.0.0.1:9")
    begun = time.monotonic()
    assert "http://127.0.0.1:9 does not answer" in _with(monkeypatch, closed, lambda: refused(job, place))
    at_once = time.monotonic() - begun  # it is refused at once, so that is what the command itself takes now
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        silent = cluster.config(tmp_path / "silent", server=f"http://127.0.0.1:{deaf.getsockname()[1]}")
        begun = time.monotonic()
        assert "does not answer" in _with(monkeypatch, silent, lambda: refused(job, place))
        assert time.monotonic() - begun - at_once < 10
    assert "no namespace 'nowhere'" in refused(job, place, "--set", "machines.kubernetes.namespace=nowhere")
    assert "could never give 3 nodes" in refused(job, place, "--machines", "3", "--workers", "3")
    cluster.forbidden = {"nodes"}
    said = refused(job, place)
    assert "does not allow this" in said and "machines.kubernetes.autoscaling" in said
    cluster.forbidden = {"jobs"}
    assert "does not allow this" in refused(job, place)
    assert not cluster.things, "the secret and the service are taken back"
    cluster.forbidden = set()
    key = ("team", "services", "refused")
    cluster.things[key] = {"metadata": {"name": "refused"}}
    assert "the name is taken" in refused(job, place)
    assert list(cluster.things) == [key], "of ours nothing is left, and what others have is theirs"


def _with(monkeypatch: pytest.MonkeyPatch, config: Path, do: Callable[[], str]) -> str:
    with monkeypatch.context() as patch:
        patch.setenv("KUBECONFIG", str(config))
        return do()


def test_what_is_missing_in_the_job_is_said(cluster: Cluster, place: Path, tmp_path: Path) -> None:
    job = job_file(tmp_path, place)
    nothing = write_job(tmp_path, {**yaml.safe_load(job.read_text()), "machines": {}}, "nothing.yaml")
    assert "machines.kubernetes.image" in refused(nothing, place)
    folderless = refused(nothing, place, "--set", "machines.kubernetes.image=x")
    assert "ReadWriteMany" in folderless and "machines.kubernetes.mount" in folderless
    outside = slipstream("submit", job, "--on", "kubernetes", cwd=tmp_path)
    assert outside.returncode == 8 and f"--run-dir {place}" in outside.stderr
    unplanned = refused(
        job, place, "--set", "machines.kubernetes.autoscaling=true", "--set", "machines.kubernetes.provider=eks"
    )
    assert "--plan plan.yaml" in unplanned
    assert not cluster.sent


def test_without_the_client(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kubernetes.py").write_text("raise ImportError\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "pip install 'slipstream[kubernetes]'" in refused(job_file(tmp_path, place), place)


def test_capacity(cluster: Cluster, place: Path, tmp_path: Path) -> None:
    """What nodes have left, by kind; whatever cannot take pods does not count."""
    cluster.nodes = [
        node("g1", "95500m", gpus=8, taints=[{"key": "nvidia.com/gpu", "effect": "NoSchedule"}]),
        node("g2", "95500m", gpus=8),
        node("g3", "95500m", gpus=8),
        node("busy", "8"),
        node("c1", "8"),
        node("off", "8", unschedulable=True),
        node("lost", "8", ready="Unknown"),
        node("master", "8", taints=[{"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}]),
    ]
    everywhere = [other(each["metadata"]["name"], "300m", owner="DaemonSet") for each in cluster.nodes]
    cluster.others = [
        *everywhere,
        other("g3", "4", gpus=6),
        other("busy", "7700m"),
        other("c1", "7", phase="Succeeded"),
    ]
    done = slipstream("capacity", "--on", "kubernetes", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    rooms = json.loads(done.stdout)
    found = [(room["machines"], room["machine"]["cores"], room["machine"]["gpus"]) for room in rooms]
    assert found == [(1, 7, []), (1, 91, ["H100"] * 2), (2, 95, ["H100"] * 8)]
    assert rooms[-1]["where"] == "nvidia.com/gpu.product=NVIDIA-H100-80GB-HBM3"
    assert rooms[-1]["machine"]["fp8"]
    only = job_file(tmp_path, place, nodes={"kubernetes.io/hostname": "g3"})
    asked = slipstream("capacity", "--on", "kubernetes", "--job", only, "--json", cwd=place)
    assert [len(room["machine"]["gpus"]) for room in json.loads(asked.stdout)] == [2]


def test_the_run_is_planned_for_one_kind_of_gpu(cluster: Cluster, place: Path, tmp_path: Path) -> None:
    cluster.nodes = [node("g1", "90", gpus=8), node("g2", "90", gpus=8), node("c", "64")]
    job = job_file(tmp_path, place)
    done = slipstream(
        "submit",
        job,
        "--on",
        "kubernetes",
        "--dry-run",
        "--set",
        "train.batch=64",
        "--set",
        "train.precision=bf16",
        cwd=place,
    )
    assert done.returncode == 0, done.stderr
    pod = list(yaml.safe_load_all(done.stdout))[2]["spec"]["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}


def test_a_cluster_that_adds_nodes_is_asked_for_those_of_the_plan(
    cluster: Cluster, place: Path, tmp_path: Path
) -> None:
    """Nobody need be allowed to list nodes; and nodes that come cost money, which somebody must agree to."""
    cluster.forbidden = {"nodes", "pods"}
    job = job_file(tmp_path, place, provider="gke", autoscaling=True)
    offer = {"cloud": "gcp", "machine": "a2-highgpu-1g", "region": "us-central1", "accelerator": "A100-40GB"}
    plan = {
        "offer": {**offer, "accelerators": 1, "spot": True, "price_per_hour": 1.5},
        "machines": 2,
        "layout": {"replicate": 2, "micro_batch": 6},
        "predicted": {"seconds": 7200.0, "cost": 6.0, "sure": 0.25},
    }
    saved = write_job(tmp_path, plan, "plan.yaml")
    words = ("submit", job, "--on", "kubernetes", "--plan", saved, "--set", "train.precision=bf16")
    shown = slipstream(*words, "--dry-run", cwd=place)
    assert shown.returncode == 0, shown.stderr
    pod = list(yaml.safe_load_all(shown.stdout))[2]["spec"]["template"]["spec"]
    assert pod["nodeSelector"]["node.kubernetes.io/instance-type"] == "a2-highgpu-1g"
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    asked = slipstream(*words, cwd=place)
    assert asked.returncode == 2 and "add --yes" in asked.stderr, asked.stderr
    assert "2 × gcp a2-highgpu-1g spot in us-central1: $3.00 an hour, about $6.00 in all" in asked.stdout
    assert not cluster.sent
