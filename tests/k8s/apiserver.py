"""A real Kubernetes API server (with etcd, without kubelets) for one test session."""

import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import yaml
from kubernetes import client, dynamic
from kubernetes.client.exceptions import ApiException

PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager")
ADMIN, MANAGER = "token-of-the-admin", "token-of-the-controller-manager"


def find_programs() -> Path | None:
    """The folder of the programs: KUBEBUILDER_ASSETS, or what `.ci/build-apiserver` made."""
    cache = Path(os.environ.get("KVPILOT_CACHE", Path.home() / ".cache/kvpilot"))
    named = os.environ.get("KUBEBUILDER_ASSETS")
    for folder in (*([Path(named)] if named else []), cache / "kube-1.20.2"):
        if all(os.access(folder / program, os.X_OK) for program in PROGRAMS):
            return folder
    return None


def wait_until(condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Polls until `condition` is true: a hang is a failure, how long it took is not judged."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)


def _free_ports(count: int) -> list[int]:
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
        secure, etcd, peer = _free_ports(3)
        self.url = f"https://127.0.0.1:{secure}"
        self.ca_file = work / "certs" / "apiserver.crt"
        self._etcd_url, self._peer_url = f"http://127.0.0.1:{etcd}", f"http://127.0.0.1:{peer}"

    def start(self) -> None:
        work = self.work
        (work / "tokens.csv").write_text(
            f'{ADMIN},admin,1,"system:masters"\n{MANAGER},system:kube-controller-manager,2\n'
        )
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
        wait_until(self._ready, "kube-apiserver is ready")
        self._spawn(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig(MANAGER)}",
            f"--service-account-private-key-file={key}",
            f"--root-ca-file={self.ca_file}",
            "--bind-address=127.0.0.1",
            "--leader-elect=false",
            "--use-service-account-credentials=false",
        )

    def _spawn(self, program: str, *options: str) -> None:
        with (self.work / f"{program}.log").open("w") as log:
            command = [str(self._programs / program), *options]
            self._children.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

    def _ready(self) -> bool:
        for child in self._children:
            assert child.poll() is None, f"{child.args} has ended: see {self.work}/*.log"
        if not self.ca_file.exists():
            return False
        try:
            with self.api(ADMIN) as api:
                request = api.param_serialize("GET", "/readyz", auth_settings=["BearerToken"])
                return api.call_api(*request, _request_timeout=2).status == 200
        except (ApiException, OSError, Exception) as error:
            if not isinstance(error, ApiException | OSError) and "urllib3" not in type(error).__module__:
                raise
            return False

    def stop(self) -> None:
        for child in reversed(self._children):
            child.terminate()
        for child in self._children:
            try:
                child.wait(20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def api(self, token: str = ADMIN, impersonate: str | None = None) -> client.ApiClient:
        """`impersonate` is the user name to act as, e.g. a service account's."""
        configuration = client.Configuration(
            host=self.url, api_key={"BearerToken": f"Bearer {token}"}, ssl_ca_cert=str(self.ca_file)
        )
        api = client.ApiClient(configuration)
        if impersonate is not None:
            api.set_default_header("Impersonate-User", impersonate)
        return api

    def dynamic(self, *, cache: Path | None = None) -> dynamic.DynamicClient:
        return dynamic.DynamicClient(self.api(), cache_file=str(cache) if cache else None)

    def kubeconfig(self, token: str, *, impersonate: str | None = None, namespace: str = "default") -> Path:
        user = {"token": token, **({"as": impersonate} if impersonate else {})}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [
                {"name": "c", "cluster": {"server": self.url, "certificate-authority": str(self.ca_file)}}
            ],
            "users": [{"name": "c", "user": user}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "c", "namespace": namespace}}],
        }
        path = self.work / f"kubeconfig-{len(list(self.work.glob('kubeconfig-*')))}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path
