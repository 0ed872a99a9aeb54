"""A Kubernetes cluster's API server, by the official client. Answers are plain values, and every error a FleetError."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from slipstream.fleet.base import FleetError
from slipstream.fleet.manifests import RUN, Document

_PATIENCE = (3.0, 5.0)
"""Seconds to reach the server, and for its answer."""
_PAGE = 500


class Cluster:
    """One namespace of one cluster."""

    def __init__(self, context: str | None, namespace: str | None) -> None:
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise FleetError("the Kubernetes client is not installed: pip install 'slipstream[kubernetes]'") from error
        settings = client.Configuration()
        settings.retries = False
        self.context, found = _load(config, settings, context)
        self.namespace = namespace or found or "default"
        self._host = settings.host
        self._api: Any = client.ApiClient(settings)
        self._core, self._batch = client.CoreV1Api(self._api), client.BatchV1Api(self._api)

    def written(self, name: str) -> str:
        """How a job here is known, also when another context has become the current one."""
        return f"{self.namespace}/{name}" + (f"@{self.context}" if self.context else "")

    def refuse_if_no_namespace(self) -> None:
        """Raise FleetError if the namespace is not there. Who may not ask finds out later."""
        try:
            self._ask(self._core.read_namespace, self.namespace)
        except _Refused as error:
            if error.code == 404:
                raise FleetError(
                    f"the cluster at {self._host} has no namespace {self.namespace!r}; set "
                    f"machines.kubernetes.namespace, or make it: kubectl create namespace {self.namespace}"
                ) from error
            if error.code != 403:
                raise

    def create(self, document: Document) -> Document:
        """Make one of ours. Raises FleetError, if its name is taken too."""
        kind, name = document["kind"], document["metadata"]["name"]
        make = {
            "Secret": self._core.create_namespaced_secret,
            "Service": self._core.create_namespaced_service,
            "Job": self._batch.create_namespaced_job,
        }[kind]
        try:
            return {**self._ask(make, self.namespace, document), "kind": kind}
        except _Refused as error:
            if error.code == 409:
                raise FleetError(
                    f"the name is taken: namespace {self.namespace} has a {kind} {name} already; name this run "
                    "otherwise with --run-dir, or delete that one"
                ) from error
            raise

    def give_to(self, owner: Document, others: list[Document]) -> None:
        """Have the cluster remove some when it removes their owner."""
        facts = {"apiVersion": "batch/v1", "kind": "Job", "name": owner["metadata"]["name"]}
        change = {"metadata": {"ownerReferences": [{**facts, "uid": owner["metadata"]["uid"]}]}}
        patch = {"Secret": self._core.patch_namespaced_secret, "Service": self._core.patch_namespaced_service}
        for document in others:
            self._ask(patch[document["kind"]], document["metadata"]["name"], self.namespace, change)

    def delete(self, kind: str, name: str) -> None:
        """Remove one of ours; a job stays until its pods have ended."""
        if kind == "Job":
            self._ask(self._batch.delete_namespaced_job, name, self.namespace, propagation_policy="Foreground")
        elif kind == "Service":
            self._ask(self._core.delete_namespaced_service, name, self.namespace)
        else:
            self._ask(self._core.delete_namespaced_secret, name, self.namespace)

    def job(self, name: str) -> Document | None:
        """None where there is none of this name."""
        try:
            return self._ask(self._batch.read_namespaced_job, name, self.namespace)
        except _Refused as error:
            if error.code == 404:
                return None
            raise

    def pods(self, name: str) -> list[Document]:
        """Those of a run."""
        found: list[Document] = self._ask(
            self._core.list_namespaced_pod, self.namespace, label_selector=f"{RUN}={name}"
        )["items"]
        return found

    def log(self, pod: str) -> str:
        """What a pod has said; nothing where it has not begun."""
        try:
            with self._answering():
                return str(self._core.read_namespaced_pod_log(pod, self.namespace, _request_timeout=_PATIENCE))
        except _Refused as error:
            if error.code in (400, 404):
                return ""
            raise

    def nodes(self) -> Iterator[Document]:
        """All of the cluster."""
        return self._pages(self._core.list_node)

    def pods_everywhere(self) -> Iterator[Document]:
        """Of all namespaces."""
        return self._pages(self._core.list_pod_for_all_namespaces)

    def _pages(self, call: Any) -> Iterator[Document]:
        more = ""
        while True:
            try:
                page = self._ask(call, limit=_PAGE, **({"_continue": more} if more else {}))
            except _Refused as error:
                if error.code != 403:
                    raise
                raise FleetError(
                    f"{error}; to know what is free one must be allowed to list nodes and pods; where the cluster adds "
                    "nodes by itself that is not needed: set machines.kubernetes.autoscaling, and submit with --plan"
                ) from error
            yield from page["items"]
            more = (page.get("metadata") or {}).get("continue") or ""
            if not more:
                return

    def _ask(self, call: Any, *values: Any, **options: Any) -> Document:
        with self._answering():
            answer = call(*values, _request_timeout=_PATIENCE, **options)
            found: Document = self._api.sanitize_for_serialization(answer)
            return found

    @contextmanager
    def _answering(self) -> Iterator[None]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            raise _Refused(self._host, self.namespace, error) from error
        except (HTTPError, OSError) as error:
            raise FleetError(
                f"the cluster's API server at {self._host} does not answer: {error}; is the address in the kubeconfig "
                "right, and the network up?"
            ) from error
        except ValueError as error:
            raise FleetError(f"what answers at {self._host} is no Kubernetes API server: {error}") from error


class _Refused(FleetError):
    """The API server has answered, and not as was asked."""

    def __init__(self, host: str, namespace: str, error: Any) -> None:
        self.code = error.status
        try:
            said = json.loads(error.body)["message"]
        except (TypeError, ValueError, KeyError):
            said = error.reason
        if self.code == 401:
            text = f"the cluster at {host} does not accept these credentials; log in again (kubectl get pods must work)"
        elif self.code == 403:
            text = f"the cluster at {host} does not allow this in namespace {namespace}: {said}"
        else:
            text = f"the cluster at {host} refuses ({self.code}): {said}"
        super().__init__(text)


def _load(config: Any, settings: Any, context: str | None) -> tuple[str | None, str | None]:
    """Fill in where the server is and who we are; the context's name and namespace, if there is one."""
    try:
        config.load_kube_config(context=context, client_configuration=settings)
        contexts, current = config.list_kube_config_contexts()
        named = next((each for each in contexts if each["name"] == context), current)
        return named["name"], named["context"].get("namespace")
    except config.ConfigException as error:
        if context is None:
            try:
                config.load_incluster_config(client_configuration=settings)
                return None, _own_namespace()
            except config.ConfigException:
                pass
        raise FleetError(
            f"no cluster is known: {error}; put a kubeconfig at ~/.kube/config, or name one in KUBECONFIG"
        ) from error
    except (
        yaml.YAMLError,
        TypeError,
        KeyError,
        AttributeError,
        OSError,
    ) as error:  # all that the client raises then
        why = " ".join(str(error).split())
        raise FleetError(f"the kubeconfig cannot be read ({why}); is KUBECONFIG, or ~/.kube/config, one?") from error


def _own_namespace() -> str | None:
    try:
        return Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace").read_text().strip()
    except OSError:
        return None
