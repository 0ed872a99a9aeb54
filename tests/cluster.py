"""A stand-in for a Kubernetes cluster: a server at an address of this machine that answers the few requests we make,
and runs the pods of a Job as processes here. It does what the documentation of Kubernetes says of Jobs, but pulls no
image."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

TOKEN = "a-secret-of-the-test"
NAMESPACES = ("default", "team")
_COLLECTION = re.compile(r"/(?:api/v1|apis/batch/v1)/namespaces/([\w-]+)/(secrets|services|jobs|pods)$")
_OBJECT = re.compile(r"/(?:api/v1|apis/batch/v1)/namespaces/([\w-]+)/(secrets|services|jobs|pods)/([\w.-]+)(/log)?$")

Document = dict[str, Any]


class Pod:
    """A process that stands for a pod."""

    def __init__(self, job: Document, secrets: dict[str, Document], index: int, folder: Path, waits: bool) -> None:
        self.index, template = index, job["spec"]["template"]
        name = job["metadata"]["name"]
        self.name = f"{name}-{index}-{uuid.uuid4().hex[:5]}"
        self.labels = template["metadata"]["labels"]
        self.log = folder / f"{self.name}.log"
        self.deleted = False
        (container,) = template["spec"]["containers"]
        self.image = container["image"]
        environment = {**os.environ, "JOB_COMPLETION_INDEX": str(index)}
        environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python` is that of the image
        for source in container["envFrom"]:
            environment |= secrets[source["secretRef"]["name"]]["stringData"]
        for variable in container["env"]:
            environment[variable["name"]] = variable.get("value") or "127.0.0.1"  # else by fieldRef: the pod's address
        head = environment["SLIPSTREAM_HEAD"]
        assert head.startswith(f"{name}-0.{template['spec']['subdomain']}:"), "no such pod has a name in the cluster"
        environment["SLIPSTREAM_HEAD"] = "127.0.0.1:" + head.rpartition(":")[2]  # as the cluster's DNS would say
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                ["sleep", "600"] if waits else container["command"],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def as_document(self, trouble: Document | None) -> Document:
        code = self.process.poll()
        phase = "Running" if code is None else "Succeeded" if code == 0 else "Failed"
        container: Document = {"name": "agent", "image": self.image, "imageID": "", "ready": not trouble}
        state = {"waiting": trouble} if trouble else {"running": {}}
        annotations = {"batch.kubernetes.io/job-completion-index": str(self.index)}
        return {
            "metadata": {"name": self.name, "labels": self.labels, "annotations": annotations},
            "spec": {"containers": [{"name": "agent", "image": self.image}]},
            "status": {
                "phase": "Pending" if trouble else phase,
                "containerStatuses": [{**container, "restartCount": 0, "state": state}],
            },
        }


class Cluster:
    """The server, what it has been given, and its pods."""

    def __init__(self, folder: Path, nodes: list[Document], others: list[Document] | None = None) -> None:
        self.folder, self.nodes, self.others = folder, nodes, others or []
        self.things: dict[tuple[str, str, str], Document] = {}
        self.sent: list[Document] = []
        self.pods: dict[str, list[Pod]] = {}
        self.trouble: Document | None = None
        """Why containers wait, where they are to."""
        self.forbidden: set[str] = set()
        self.failures: dict[str, int] = {}
        self.lock = threading.RLock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cluster": self}))
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self.server.serve_forever), threading.Thread(target=self._control)]
        for thread in self._threads:
            thread.start()

    def config(self, path: Path, token: str = TOKEN, server: str | None = None, namespace: str = "team") -> Path:
        """A kubeconfig."""
        context = {"cluster": "here", "user": "me", "namespace": namespace}
        values = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": {"server": server or self.address}}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
        path.write_text(yaml.safe_dump(values))
        return path

    def close(self) -> None:
        self._over.set()
        self.server.shutdown()
        self.server.server_close()
        for thread in self._threads:
            thread.join()
        for pod in [pod for pods in self.pods.values() for pod in pods]:
            if pod.process.poll() is None:
                os.killpg(pod.process.pid, signal.SIGKILL)
                pod.process.wait()

    def begin(self, namespace: str, job: Document) -> None:
        """What the controller of Jobs does with a new one."""
        secrets = {
            name: thing for (space, kind, name), thing in self.things.items() if (space, kind) == (namespace, "secrets")
        }
        pods = [
            Pod(job, secrets, index, self.folder, bool(self.trouble)) for index in range(job["spec"]["completions"])
        ]
        self.pods[job["metadata"]["name"]] = pods

    def _control(self) -> None:
        while not self._over.wait(0.05):
            with self.lock:
                for key, job in list(self.things.items()):
                    if key[1] == "jobs" and not job["spec"].get("suspend"):
                        self._advance(key, job)

    def _advance(self, key: tuple[str, str, str], job: Document) -> None:
        pods, spec = self.pods[key[2]], job["spec"]
        codes = [pod.process.poll() for pod in pods]
        if job["metadata"].get("deletionTimestamp"):
            if None not in codes:
                self._remove(key, job)
            return
        if job["status"].get("conditions"):
            return
        if (codes[0] == 0 and "successPolicy" in spec) or all(code == 0 for code in codes):
            self._end(job, "Complete")
        for number, code in enumerate(codes):
            if not code:
                continue
            final = spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]
            self.failures[key[2]] = self.failures.get(key[2], 0) + 1
            if code in final or self.failures[key[2]] > spec["backoffLimit"]:
                self._end(job, "Failed")
                return
            secrets = {
                name: thing
                for (space, kind, name), thing in self.things.items()
                if (space, kind) == (key[0], "secrets")
            }
            pods[number] = Pod(job, secrets, number, self.folder, bool(self.trouble))

    def _end(self, job: Document, how: str) -> None:
        job["status"]["conditions"] = [{"type": how, "status": "True"}]
        self._tell(job)

    def _tell(self, job: Document) -> None:
        for pod in self.pods[job["metadata"]["name"]]:
            if pod.process.poll() is None:
                pod.process.terminate()

    def delete(self, key: tuple[str, str, str]) -> None:
        job = self.things[key]
        if key[1] != "jobs" or job["spec"].get("suspend"):
            self._remove(key, job)
            return
        job["metadata"]["deletionTimestamp"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._tell(job)

    def _remove(self, key: tuple[str, str, str], thing: Document) -> None:
        """And what belongs to it."""
        del self.things[key]
        for other, owned in list(self.things.items()):
            if any(owner["uid"] == thing["metadata"]["uid"] for owner in owned["metadata"].get("ownerReferences", [])):
                del self.things[other]


class _Handler(BaseHTTPRequestHandler):
    cluster: Cluster

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, code: int, value: Any) -> None:
        body = value.encode() if isinstance(value, str) else json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(value, str) else "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _refuse(self, code: int, message: str) -> None:
        self._answer(
            code, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code}
        )

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length)) if length else {}
        path = urlsplit(self.path).path
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self._refuse(401, "Unauthorized")
        elif path.rpartition("/")[2] in self.cluster.forbidden:
            self._refuse(403, f"{path.rpartition('/')[2]} is forbidden: User cannot list resource")
        else:
            with self.cluster.lock:
                self._do(path, body)

    do_GET = do_POST = do_PATCH = do_DELETE = _handle

    def _do(self, path: str, body: Document) -> None:
        cluster = self.cluster
        if path in ("/api/v1/nodes", "/api/v1/pods"):
            self._answer(200, {"items": cluster.nodes if path.endswith("nodes") else cluster.others, "metadata": {}})
        elif space := re.fullmatch(r"/api/v1/namespaces/([\w-]+)", path):
            if space[1] in NAMESPACES:
                self._answer(200, {"metadata": {"name": space[1]}})
            else:
                self._refuse(404, f'namespaces "{space[1]}" not found')
        elif found := _COLLECTION.fullmatch(path):
            self._collection(found[1], found[2], body)
        elif found := _OBJECT.fullmatch(path):
            self._object((found[1], found[2], found[3]), bool(found[4]), body)
        else:
            self._refuse(404, f"the server could not find the requested resource {path}")

    def _collection(self, space: str, kind: str, body: Document) -> None:
        cluster = self.cluster
        if self.command == "GET":
            assert kind == "pods"
            (wanted,) = parse_qs(urlsplit(self.path).query)["labelSelector"]
            key, _, value = wanted.partition("=")
            pods = [pod for pods in cluster.pods.values() for pod in pods if pod.labels.get(key) == value]
            self._answer(200, {"items": [pod.as_document(cluster.trouble) for pod in pods], "metadata": {}})
            return
        name = body["metadata"]["name"]
        if (space, kind, name) in cluster.things:
            self._refuse(409, f'{kind} "{name}" already exists')
            return
        cluster.sent.append(json.loads(json.dumps(body)))
        made = {**body, "metadata": {**body["metadata"], "uid": str(uuid.uuid4())}, "status": {}}
        cluster.things[space, kind, name] = made
        if kind == "jobs" and not body["spec"].get("suspend"):
            cluster.begin(space, made)
        self._answer(201, made)

    def _object(self, key: tuple[str, str, str], log: bool, body: Document) -> None:
        cluster = self.cluster
        if log:
            pod = next(pod for pods in cluster.pods.values() for pod in pods if pod.name == key[2])
            self._answer(200, pod.log.read_text())
        elif key not in cluster.things:
            self._refuse(404, f'{key[1]} "{key[2]}" not found')
        elif self.command == "GET":
            self._answer(200, cluster.things[key])
        elif self.command == "PATCH":
            cluster.things[key]["metadata"] |= body["metadata"]
            self._answer(200, cluster.things[key])
        else:
            cluster.delete(key)
            self._answer(200, {"kind": "Status", "status": "Success"})
