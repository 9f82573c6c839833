"""A real Kubernetes API server (with etcd and the controller manager, without kubelets) and what runs against it."""

import copy
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import yaml

MANIFESTS = Path(__file__).parents[2] / "k8s" / "manifests"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
REQUIRED = os.environ.get("KVPILOT_REQUIRE_APISERVER") == "1"
ADMIN = "token-of-the-admin"
NAMESPACE = "kvpilot"


def missing(reason: str) -> NoReturn:
    """Skips, unless everything has to run."""
    if REQUIRED:
        pytest.fail(f"KVPILOT_REQUIRE_APISERVER=1, but {reason}")
    pytest.skip(reason)


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """Polls until `condition` is true and returns it. The limit catches hangs: how long it took is not judged."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return result


def find_programs() -> Path | None:
    """The folder of the programs: KUBEBUILDER_ASSETS, or what `.ci/build-apiserver` made."""
    cache = Path(os.environ.get("KVPILOT_CACHE", Path.home() / ".cache/kvpilot"))
    named = os.environ.get("KUBEBUILDER_ASSETS")
    for folder in (*([Path(named)] if named else []), cache / "kube-1.20.2"):
        if all(os.access(folder / program, os.X_OK) for program in PROGRAMS):
            return folder
    return None


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class ApiServer:
    """RBAC is on; `admin` may do everything. The controller manager makes ReplicaSets and Pods of Deployments."""

    def __init__(self, programs: Path, work: Path) -> None:
        self.work, self._programs = work, programs
        self._children: list[subprocess.Popen] = []
        self._apis: list[Any] = []
        secure, etcd, peer = free_ports(3)
        self.url = f"https://127.0.0.1:{secure}"
        self.ca_file = work / "certs" / "apiserver.crt"
        self._etcd_url, self._peer_url = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"

    def start(self) -> None:
        work = self.work
        (work / "tokens.csv").write_text(f'{ADMIN},admin,1,"system:masters"\n')
        key, public = work / "sa.key", work / "sa.pub"
        for command in (["genrsa", "-out", key, "2048"], ["rsa", "-in", key, "-pubout", "-out", public]):
            subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True)
        self._spawn(
            "etcd",
            f"--data-dir={work / 'etcd'}",
            "--unsafe-no-fsync",
            f"--listen-client-urls={self._etcd_url}",
            f"--advertise-client-urls={self._etcd_url}",
            f"--listen-peer-urls={self._peer_url}",
            f"--initial-advertise-peer-urls={self._peer_url}",
            f"--initial-cluster=default={self._peer_url}",
        )
        self._spawn(
            "kube-apiserver",
            f"--etcd-servers={self._etcd_url}",
            f"--secure-port={self.url.rsplit(':', 1)[1]}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--cert-dir={self.ca_file.parent}",
            f"--token-auth-file={work / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={key}",
            "--service-cluster-ip-range=10.0.0.0/24",
        )
        wait_for(self._ready, "kube-apiserver is ready", 120)
        self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig(ADMIN)}",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={self.ca_file}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
        )

    def _spawn(self, program: str, *options: str) -> None:
        with (self.work / f"{program}.log").open("w") as log:
            command = [str(self._programs / program), *options]
            self._children.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

    def _ready(self) -> bool:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        for child in self._children:
            assert child.poll() is None, f"{child.args} has ended: see {self.work}/*.log"
        if not self.ca_file.exists():
            return False
        try:
            api = self.api()
            request = api.param_serialize("GET", "/readyz", auth_settings=["BearerToken"])
            return api.call_api(*request, _request_timeout=2).status == 200
        except (ApiException, HTTPError, OSError):
            return False

    def stop(self) -> None:
        for api in self._apis:
            api.close()
        for child in reversed(self._children):  # nothing of theirs is kept
            child.kill()
            child.wait()

    def api(self, token: str = ADMIN, *, impersonate: str | None = None) -> Any:
        """A client; `impersonate` is the user to act as, e.g. system:serviceaccount:NAMESPACE:NAME."""
        from kubernetes import client

        configuration = client.Configuration(
            host=self.url,
            api_key={"BearerToken": token},
            api_key_prefix={"BearerToken": "Bearer"},
            ssl_ca_cert=str(self.ca_file),
        )
        configuration.retries = 0
        api = client.ApiClient(configuration)
        if impersonate is not None:
            api.set_default_header("Impersonate-User", impersonate)
        self._apis.append(api)
        return api

    def kubeconfig(self, token: str) -> Path:
        cluster = {"server": self.url, "certificate-authority": str(self.ca_file)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "c", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c"}}],
        }
        path = self.work / f"kubeconfig-{len(list(self.work.glob('kubeconfig-*')))}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    def account_token(self, account: str) -> str:
        """As the kubelet would hand it to a pod: short-lived, with the rights of the account."""
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"expirationSeconds": 3600},
        }
        path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{account}/token"
        return self.call("POST", path, body)["status"]["token"]

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> Any:
        """Any request as JSON; options are `api`, `query` and `content_type`. ApiException if it is refused."""
        import json

        api = options.get("api") or self._admin
        request = api.param_serialize(
            method,
            path,
            query_params=options.get("query", []),
            header_params={"Content-Type": options.get("content_type", "application/json")},
            body=body,
            auth_settings=["BearerToken"],
        )
        answer = api.call_api(*request, _request_timeout=20)
        data = answer.read()
        api.response_deserialize(answer, {})
        return json.loads(data)

    @property
    def _admin(self) -> Any:
        if not hasattr(self, "_admin_api"):
            self._admin_api = self.api()
        return self._admin_api


@pytest.fixture(scope="session")
def render() -> Callable[[str], list[dict[str, Any]]]:
    """The resources of an overlay, as kubectl or kustomize renders them."""
    program = shutil.which("kustomize"), shutil.which("kubectl")
    if not any(program):
        missing("neither kustomize nor kubectl is installed")
    command = [program[0], "build"] if program[0] else [program[1], "kustomize"]

    def run(overlay: str) -> list[dict[str, Any]]:
        folder = str(MANIFESTS / "overlays" / overlay)
        result = subprocess.run([*command, folder], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return list(yaml.safe_load_all(result.stdout))

    return run


@pytest.fixture(scope="session")
def bare_api_server(tmp_path_factory) -> Iterator[ApiServer]:
    if importlib.util.find_spec("kubernetes") is None:
        missing("the extra k8s is not installed")
    programs = find_programs()
    if programs is None:
        missing("there is no kube-apiserver: .ci/build-apiserver builds it")
    server = ApiServer(programs, tmp_path_factory.mktemp("apiserver"))
    try:
        server.start()
        yield server
    finally:
        server.stop()


PATHS = {  # kind -> path of its collection
    "Namespace": "/api/v1/namespaces",
    "ConfigMap": "/api/v1/namespaces/{ns}/configmaps",
    "Service": "/api/v1/namespaces/{ns}/services",
    "ServiceAccount": "/api/v1/namespaces/{ns}/serviceaccounts",
    "Pod": "/api/v1/namespaces/{ns}/pods",
    "Event": "/api/v1/namespaces/{ns}/events",
    "Deployment": "/apis/apps/v1/namespaces/{ns}/deployments",
    "Lease": "/apis/coordination.k8s.io/v1/namespaces/{ns}/leases",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/rolebindings",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/namespaces/{ns}/networkpolicies",
    "PodDisruptionBudget": "/apis/policy/v1beta1/namespaces/{ns}/poddisruptionbudgets",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
    "KVPolicy": "/apis/kvpilot.dev/v1alpha1/namespaces/{ns}/kvpolicies",
    "PodMonitor": "/apis/monitoring.coreos.com/v1/namespaces/{ns}/podmonitors",
    "PrometheusRule": "/apis/monitoring.coreos.com/v1/namespaces/{ns}/prometheusrules",
}


def path_of(kind: str, name: str | None = None) -> str:
    return PATHS[kind].format(ns=NAMESPACE) + (f"/{name}" if name else "")


class TestCluster:
    """The installed advisory overlay without its workloads, and what a test does to a cluster."""

    __test__ = False

    def __init__(self, server: ApiServer, resources: list[dict[str, Any]]) -> None:
        self.server, self.resources = server, resources
        self.stop_operators: Callable[[], None] = lambda: None
        self._count = 0

    def install(self) -> None:
        wanted = ("Namespace", "CustomResourceDefinition", "ServiceAccount", "Role", "RoleBinding")
        for kind in wanted:
            for resource in self.resources:
                if resource["kind"] == kind:
                    self.create(resource)

        def served() -> bool:
            groups = self.server.call("GET", "/apis")["groups"]
            return any(group["name"] == "kvpilot.dev" for group in groups)

        wait_for(served, "the API server serves KVPolicies")
        wait_for(lambda: self.try_get("KVPolicy") is not None, "KVPolicies can be listed")

    def create(self, resource: dict[str, Any], **options: Any) -> dict[str, Any]:
        return self.server.call("POST", path_of(resource["kind"]), resource, **options)

    def get(self, kind: str, name: str | None = None) -> dict[str, Any]:
        return self.server.call("GET", path_of(kind, name))

    def try_get(self, kind: str, name: str | None = None) -> dict[str, Any] | None:
        from kubernetes.client.exceptions import ApiException

        try:
            return self.get(kind, name)
        except ApiException as error:
            if error.status == 404:
                return None
            raise

    def patch(self, kind: str, name: str, body: dict[str, Any], *, status: bool = False) -> dict[str, Any]:
        path = path_of(kind, name) + ("/status" if status else "")
        return self.server.call("PATCH", path, body, content_type="application/merge-patch+json")

    def delete(self, kind: str, name: str) -> None:
        self.server.call("DELETE", path_of(kind, name))

    def manifest(self, kind: str, name: str) -> dict[str, Any]:
        (found,) = [
            each for each in self.resources if (each["kind"], each["metadata"]["name"]) == (kind, name)
        ]
        return copy.deepcopy(found)

    def new_name(self) -> str:
        self._count += 1
        return f"engine-{self._count}"

    def deploy(self, name: str, replicas: int, *, port: int = 8000, network: int = 1) -> list[dict[str, Any]]:
        """The engine's Deployment under another name, all its pods ready as if kubelets ran them.

        Their addresses are 127.0.`network`.1 and so on, their metrics on `port`.
        """
        labels = {"app.kubernetes.io/name": name}
        deployment = self.manifest("Deployment", "kvpilot-engine")
        deployment["metadata"] = {"name": name, "namespace": NAMESPACE, "labels": labels}
        deployment["spec"].update(replicas=replicas, selector={"matchLabels": labels})
        deployment["spec"]["template"]["metadata"]["labels"] = labels
        (engine,) = deployment["spec"]["template"]["spec"]["containers"]
        engine["ports"] = [{"name": "http", "containerPort": port}]
        for volume in deployment["spec"]["template"]["spec"]["volumes"]:
            if volume["name"] == "control":
                volume["configMap"]["name"] = f"{name}-control"
        self.create(deployment)
        return self.run_pods(name, replicas, network=network)

    def pods(self, name: str) -> list[dict[str, Any]]:
        query = [("labelSelector", f"app.kubernetes.io/name={name}")]
        return self.server.call("GET", path_of("Pod"), query=query)["items"]

    def run_pods(self, name: str, count: int, *, network: int = 1) -> list[dict[str, Any]]:
        """What kubelets would do: every pod gets an address and is ready. Waits until the Deployment says so."""
        wait_for(lambda: len(self.pods(name)) >= count, f"{count} pods of {name}")
        for position, pod in enumerate(self.pods(name)):
            if not pod["status"].get("podIP"):
                self.make_ready(pod["metadata"]["name"], f"127.0.{network}.{position + 1}")

        def steady() -> bool:
            status = self.get("Deployment", name).get("status", {})
            return status.get("readyReplicas") == status.get("updatedReplicas") == count

        wait_for(steady, f"{count} pods of {name} are ready")
        return self.pods(name)

    def make_ready(self, pod: str, address: str) -> None:
        ready = {"type": "Ready", "status": "True"}
        self.patch("Pod", pod, {"status": {"conditions": [ready], "podIP": address}}, status=True)

    def create_policy(self, name: str, **spec: Any) -> dict[str, Any]:
        target = {"kind": "Deployment", "name": name}
        resource = {
            "apiVersion": "kvpilot.dev/v1alpha1",
            "kind": "KVPolicy",
            "metadata": {"name": name, "namespace": NAMESPACE},
            "spec": {"target": target, **spec},
        }
        return self.create(resource)

    def condition(self, name: str, condition: str) -> dict[str, Any]:
        """Of a KVPolicy; empty if it has none."""
        conditions = self.get("KVPolicy", name).get("status", {}).get("conditions", [])
        return next((each for each in conditions if each["type"] == condition), {})

    def wait_for_condition(self, name: str, condition: str, status: str, reason: str) -> dict[str, Any]:
        def there() -> Any:
            found = self.condition(name, condition)
            return found if (found.get("status"), found.get("reason")) == (status, reason) else None

        try:
            return wait_for(there, "")
        except AssertionError:
            found = self.get("KVPolicy", name).get("status")
            pytest.fail(f"{name}: {condition} is not {status} ({reason}): {found}")

    def document(self, name: str) -> dict[str, Any] | None:
        """The control document of a target."""
        found = self.try_get("ConfigMap", f"{name}-control")
        return yaml.safe_load(found["data"]["control.yaml"]) if found else None

    def wait_for_document(self, name: str, **content: Any) -> dict[str, Any]:
        def there() -> Any:
            document = self.document(name) or {}
            return document if all(document.get(key) == value for key, value in content.items()) else None

        try:
            return wait_for(there, "")
        except AssertionError:
            pytest.fail(f"the document of {name} does not say {content}: {self.document(name)}")

    def events(self, name: str) -> list[tuple[str, str]]:
        """Type and reason of the events of a KVPolicy, in order."""
        events = self.get("Event")["items"]
        mine = [
            event
            for event in events
            if (event["involvedObject"]["kind"], event["involvedObject"].get("name")) == ("KVPolicy", name)
        ]
        mine.sort(key=lambda event: int(event["metadata"]["resourceVersion"]))
        return [(event["type"], event["reason"]) for event in mine]

    def wait_for_events(self, name: str, expected: list[tuple[str, str]]) -> None:
        try:
            wait_for(lambda: self.events(name) == expected, "")
        except AssertionError:
            pytest.fail(f"events of {name}: {self.events(name)}, expected {expected}")

    def wait_for_event(self, name: str, kind: str, reason: str) -> None:
        """Events follow the status that they are about."""
        wait_for(
            lambda: (kind, reason) in self.events(name), f"event {reason} of {name}: {self.events(name)}"
        )

    def wait_for_generation(self, name: str, generation: int) -> None:
        """Until the operator has seen a change of the specification."""
        wait_for(
            lambda: self.get("KVPolicy", name).get("status", {}).get("observedGeneration") == generation,
            f"generation {generation} of {name} is observed",
        )


def wait_for_later_second(resource: dict[str, Any]) -> bool:
    """Creation times have a resolution of a second: waits until a new resource is younger than this one."""
    created = resource["metadata"]["creationTimestamp"]
    return wait_for(lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()) > created, "the next second")


@pytest.fixture(scope="session")
def cluster(bare_api_server, render) -> TestCluster:
    cluster = TestCluster(bare_api_server, render("advisory"))
    cluster.install()
    return cluster


@pytest.fixture
def start_operator(cluster, tmp_path) -> Iterator[Callable[..., subprocess.Popen]]:
    """`autotune operator` as a process, with the rights of its service account and no others."""
    children: list[subprocess.Popen] = []

    def start(*options: str, lease_seconds: int = 3) -> subprocess.Popen:
        kubeconfig = cluster.server.kubeconfig(cluster.server.account_token("kvpilot-operator"))
        log = tmp_path / f"operator-{len(children)}.log"
        command = ["-m", "kvpilot.agent.cli", "operator", "--namespace", NAMESPACE, "--resync", "0.5"]
        with log.open("w") as output:
            child = subprocess.Popen(
                [sys.executable, "-P", *command, "--lease-seconds", str(lease_seconds), *options],
                env={**os.environ, "KUBECONFIG": str(kubeconfig), "POD_NAME": f"operator-{len(children)}"},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
            )
        child.log = log  # pyright: ignore[reportAttributeAccessIssue]
        children.append(child)
        return child

    def stop_all() -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(signal.SIGTERM)
        for child in children:
            child.wait(30)

    cluster.stop_operators = stop_all
    yield start
    stop_all()
    for child in children:
        text = child.log.read_text()  # pyright: ignore[reportAttributeAccessIssue]
        assert "Traceback" not in text, text
        assert "Forbidden" not in text, text


@pytest.fixture(scope="session")
def helpers() -> SimpleNamespace:
    return SimpleNamespace(
        wait_for=wait_for,
        wait_for_later_second=wait_for_later_second,
        path_of=path_of,
        manifests=MANIFESTS,
        namespace=NAMESPACE,
        free_ports=free_ports,
    )
