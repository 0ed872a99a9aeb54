"""A stand-in for SkyPilot's API server: it answers SkyPilot's own client, in SkyPilot's own encoding, and runs a job's
script as one process for each machine, with the variables that SkyPilot documents. Nothing is rented."""

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import orjson
import sky
import yaml
from sky.server import constants
from sky.server.requests import payloads
from sky.server.requests.serializers import encoders


class Server:
    """One server, its jobs and their machines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.enabled = True
        self.jobs: list[dict[str, Any]] = []
        self.answers: dict[str, tuple[str, Any]] = {}
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"cloud": self}))
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()
        for job in self.jobs:
            for machine in job["machines"]:
                if machine.poll() is None:
                    os.killpg(machine.pid, 9)
                    machine.wait()

    def launch(self, text: str, name: str) -> int:
        (task,) = [each for each in yaml.safe_load_all(text) if "run" in each]
        number, machines = len(self.jobs) + 1, []
        log = self.folder / f"job-{number}.log"
        for rank in range(task["num_nodes"]):
            environment = {**os.environ, **task["secrets"], "SKYPILOT_NODE_RANK": str(rank)}
            environment["SKYPILOT_NODE_IPS"] = "\n".join(f"127.0.0.{1 + each}" for each in range(task["num_nodes"]))
            environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # `python` is the image's
            with log.open("ab") as file:
                command = ["bash", "-c", task["run"]]
                machines.append(
                    subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)
                )
        self.jobs.append({"task": task, "name": name, "machines": machines, "log": log, "cancelled": False})
        return number

    def state(self, job: dict[str, Any]) -> str:
        codes = [machine.poll() for machine in job["machines"]]
        if job["cancelled"]:
            return "CANCELLED"
        return "RUNNING" if None in codes else "FAILED" if any(codes) else "SUCCEEDED"

    def do(self, path: str, body: dict[str, Any]) -> tuple[str, Any]:
        """A request's name, as SkyPilot knows it, and what comes of it."""
        match path:
            case "/check":
                (cloud,) = body["clouds"]
                name = str(sky.CLOUD_REGISTRY.from_str(cloud))
                return "sky.check", {"default": {name: ["compute"]} if self.enabled else {}}
            case "/jobs/launch":
                return "sky.jobs.launch", {"job_id": [self.launch(body["task"], body["name"])], "handle": None}
            case "/jobs/queue/v2":
                wanted = [(number, self.jobs[number - 1]) for number in body["job_ids"] if number <= len(self.jobs)]
                rows = [{"job_id": number, "status": self.state(job)} for number, job in wanted]
                return "sky.jobs.queue_v2", {"jobs": rows, "total": len(rows)}
            case "/jobs/cancel":
                for number in body["job_ids"]:
                    self.jobs[number - 1]["cancelled"] = True
                return "sky.jobs.cancel", None
        raise AssertionError(path)


class _Handler(BaseHTTPRequestHandler):
    cloud: Server

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, text: str, request: str = "") -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.send_header(constants.API_VERSION_HEADER, str(constants.API_VERSION))
        self.send_header(constants.VERSION_HEADER, sky.__version__)
        if request:
            self.send_header("X-Skypilot-Request-ID", request)
            self.send_header(constants.STREAM_REQUEST_HEADER, request)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        split = urlsplit(self.path)
        if split.path == "/api/health":
            version = {"api_version": str(constants.API_VERSION), "version": sky.__version__, "commit": sky.__commit__}
            self._answer(json.dumps({"status": "healthy", **version}))
            return
        (request,) = parse_qs(split.query)["request_id"]
        if split.path == "/api/stream":
            self._answer("", request)
            return
        assert split.path == "/api/get", split.path
        name, value = self.cloud.answers[request]
        payload = payloads.RequestPayload(
            request_id=request,
            name=name,
            entrypoint=encoders.pickle_and_encode(print),
            request_body=encoders.pickle_and_encode(payloads.RequestBody()),
            status="SUCCEEDED",
            created_at=time.time(),
            user_id="someone",
            return_value=orjson.dumps(value).decode(),
            error="null",
            pid=None,
            schedule_type="short",
        )
        self._answer(payload.model_dump_json())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)))
        path, request = urlsplit(self.path).path, str(uuid.uuid4())
        if path == "/validate":
            self._answer("null", request)
        elif path == "/jobs/logs":
            self._answer(self.cloud.jobs[body["job_id"] - 1]["log"].read_text(), request)
        else:
            self.cloud.answers[request] = self.cloud.do(path, body)
            self._answer("", request)
