"""The only module of the operator that talks to the API server. Dicts in, dicts out, one error tree.

Resources are named here rather than discovered: no discovery cache to write, no permission for it.
"""

import logging
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from kubernetes import client, config, watch
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient, Resource
from urllib3.exceptions import HTTPError

from kvpilot.k8s.errors import ClusterError, StaleWriteError
from kvpilot.k8s.lease import LeaseRecord
from kvpilot.k8s.policy_resource import GROUP, KIND, PLURAL, VERSION, Target

log = logging.getLogger(__name__)
TIMEOUT_SECONDS = 5.0  # of one request: shorter than what a Lease is trusted for
WATCH_SECONDS = 240  # then the watch is opened anew
COMPONENT = "kvpilot-operator"

RESOURCES = {  # kind -> group, version, plural
    "ConfigMap": ("", "v1", "configmaps"),
    "Event": ("", "v1", "events"),
    "Pod": ("", "v1", "pods"),
    "Deployment": ("apps", "v1", "deployments"),
    "StatefulSet": ("apps", "v1", "statefulsets"),
    "Lease": ("coordination.k8s.io", "v1", "leases"),
    KIND: (GROUP, VERSION, PLURAL),
}


def connect() -> client.ApiClient:
    """As a pod with a service account, or by KUBECONFIG. ClusterError if there is neither."""
    configuration = client.Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=configuration)
        except config.ConfigException:
            config.load_kube_config(client_configuration=configuration)
    except (config.ConfigException, OSError) as error:
        raise ClusterError(
            f"no cluster: {error}; run in a pod with a service account, or set KUBECONFIG"
        ) from error
    return client.ApiClient(configuration)


class Cluster:
    """One namespace of one cluster. Safe to use from several threads."""

    def __init__(self, api: client.ApiClient, namespace: str) -> None:
        self.namespace = namespace
        self._api = api
        self._dynamic = DynamicClient(api, discoverer=lambda _client, _cache: None)
        self._resources = {kind: self._resource(kind) for kind in RESOURCES}
        self._watchers: dict[str, watch.Watch] = {}  # open ones, by kind

    def _resource(self, kind: str) -> Resource:
        group, version, plural = RESOURCES[kind]
        return Resource(
            prefix="apis" if group else "api",
            group=group,
            api_version=version,
            kind=kind,
            name=plural,
            namespaced=True,
            verbs=[],
            client=self._dynamic,
        )

    def close(self) -> None:
        """Ends open watches too: set their `stop` first."""
        for watcher in list(self._watchers.values()):
            watcher.stop()
        self._api.close()

    def policies(self) -> list[dict[str, Any]]:
        return self._list(KIND)

    def workload(self, target: Target) -> dict[str, Any] | None:
        return self._get(target.kind, target.name)

    def pods(self, selector: str) -> list[dict[str, Any]]:
        return self._list("Pod", label_selector=selector)

    def config_map(self, name: str) -> dict[str, Any] | None:
        return self._get("ConfigMap", name)

    def write_config_map(self, body: dict[str, Any]) -> None:
        """Creates it, or replaces the very version that `body` was read as; else StaleWriteError."""
        self._write("ConfigMap", body)

    def write_status(self, policy: Mapping[str, Any], status: Mapping[str, Any]) -> None:
        """Replaces the status of the version read; StaleWriteError if the resource has changed since."""
        name = policy["metadata"]["name"]
        body = {**policy, "status": dict(status)}
        with self._errors(f"write status of {KIND} {name}"):
            self._dynamic.request(
                "put",
                f"{self._resources[KIND].path(name=name, namespace=self.namespace)}/status",
                body=body,
                _request_timeout=TIMEOUT_SECONDS,
            )

    def event(self, policy: Mapping[str, Any], *, warning: bool, reason: str, message: str) -> None:
        """Tells people what has happened to a KVPolicy (`kubectl describe`)."""
        name, uid = policy["metadata"]["name"], policy["metadata"]["uid"]
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{name}.{uuid.uuid4().hex[:16]}", "namespace": self.namespace},
            "involvedObject": {
                "apiVersion": f"{GROUP}/{VERSION}",
                "kind": KIND,
                "name": name,
                "namespace": self.namespace,
                "uid": uid,
            },
            "type": "Warning" if warning else "Normal",
            "reason": reason,
            "message": message[:1024],
            "source": {"component": COMPONENT, "host": socket.gethostname()},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        with self._errors(f"create event {reason}"):
            self._dynamic.create(self._resources["Event"], body=body, **self._request())

    def read_lease(self, name: str) -> LeaseRecord | None:
        lease = self._get("Lease", name)
        return None if lease is None else _lease_record(lease)

    def write_lease(self, name: str, record: LeaseRecord) -> LeaseRecord:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": record.duration_seconds,
            "leaseTransitions": record.transitions,
            "renewTime": now,
        }
        metadata = {"name": name, "namespace": self.namespace}
        if record.resource_version:
            metadata["resourceVersion"] = record.resource_version
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        return _lease_record(self._write("Lease", body))

    def watch(self, kind: str, on_change: Callable[[], None], stop: threading.Event) -> None:
        """Calls `on_change` for every change until `stop` is set. Blocks; the caller's rounds see what is missed."""
        while not stop.is_set():
            try:
                with self._errors(f"watch {RESOURCES[kind][2]}"):
                    self._watch_once(kind, on_change, stop)
            except ClusterError as error:
                if not stop.is_set():
                    log.warning("%s", error)
                stop.wait(5)

    def _watch_once(self, kind: str, on_change: Callable[[], None], stop: threading.Event) -> None:
        watcher = self._watchers[kind] = watch.Watch()
        resource = self._resources[kind]
        for _ in self._dynamic.watch(
            resource, namespace=self.namespace, timeout=WATCH_SECONDS, watcher=watcher
        ):
            if stop.is_set():
                return
            on_change()

    def _request(self) -> dict[str, Any]:
        return {"namespace": self.namespace, "_request_timeout": TIMEOUT_SECONDS}

    def _get(self, kind: str, name: str) -> dict[str, Any] | None:
        with self._errors(f"get {kind} {name}"):
            try:
                found = self._dynamic.get(self._resources[kind], name=name, **self._request())
            except ApiException as error:
                if error.status == 404:
                    return None
                raise
            return found.to_dict()

    def _list(self, kind: str, **query: str) -> list[dict[str, Any]]:
        with self._errors(f"list {RESOURCES[kind][2]}"):
            found = self._dynamic.get(self._resources[kind], **query, **self._request()).to_dict()
            return found["items"]

    def _write(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        name, resource = body["metadata"]["name"], self._resources[kind]
        with self._errors(f"write {kind} {name}"):
            if "resourceVersion" in body["metadata"]:
                return self._dynamic.replace(resource, body=body, name=name, **self._request()).to_dict()
            return self._dynamic.create(resource, body=body, **self._request()).to_dict()

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except ApiException as error:
            kind = StaleWriteError if error.status == 409 else ClusterError
            body = error.body.decode() if isinstance(error.body, bytes) else error.body
            raise kind(
                f"{what} in {self.namespace}: {error.status} {error.reason}: {body or '':.300}"
            ) from error
        except (HTTPError, OSError) as error:
            raise ClusterError(f"{what} in {self.namespace}: {type(error).__name__}: {error}") from error


def _lease_record(lease: Mapping[str, Any]) -> LeaseRecord:
    spec = lease.get("spec", {})
    return LeaseRecord(
        holder=spec.get("holderIdentity") or "",
        duration_seconds=spec.get("leaseDurationSeconds") or 1,
        transitions=spec.get("leaseTransitions") or 0,
        resource_version=lease["metadata"]["resourceVersion"],
    )
