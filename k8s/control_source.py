"""The sidecar's side: the control document through the API within a second, or from a mounted file.

The kubelet refreshes a mounted ConfigMap about once a minute. With a service-account token the sidecar also watches
that one ConfigMap. Plain HTTP does for one GET: the client library takes some 35 MB more.
"""

import json
import os
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvpilot.engine.errors import ConfigError
from kvpilot.k8s.control_document import CONTROL_KEY
from kvpilot.k8s.document_source import DocumentFile, DocumentSource, Found

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_SECONDS = 60  # then the watch is opened anew: a connection that died silently is noticed
RETRY_SECONDS = 2.0


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Which ConfigMap to watch, and how the API server is reached."""

    config_map: str
    namespace: str
    server: str  # https://HOST:PORT
    token_file: Path = ACCOUNT_FOLDER / "token"  # read for every request: the kubelet renews it
    ca_file: Path = ACCOUNT_FOLDER / "ca.crt"


def watch_config_in_pod(
    config_map: str, environment: Mapping[str, str] = os.environ, *, account: Path = ACCOUNT_FOLDER
) -> WatchConfig:
    """As a pod knows it: KUBERNETES_SERVICE_HOST and _PORT, and POD_NAMESPACE by the downward API. `account` is where
    the service account's token and ca.crt are mounted."""
    try:
        host, port = environment["KUBERNETES_SERVICE_HOST"], environment["KUBERNETES_SERVICE_PORT"]
        namespace = environment["POD_NAMESPACE"]
    except KeyError as error:
        raise ConfigError(
            f"control_config_map={config_map!r} needs {error} in the environment of a pod"
        ) from error
    address = f"[{host}]" if ":" in host else host
    return WatchConfig(
        config_map=config_map,
        namespace=namespace,
        server=f"https://{address}:{port}",
        token_file=account / "token",
        ca_file=account / "ca.crt",
    )


class ControlSource(DocumentSource):
    """While the API answers, what it says counts, otherwise the file."""

    def __init__(self, watch: WatchConfig, *, file: Path | None = None) -> None:
        super().__init__(f"ConfigMap {watch.config_map}")
        self._watch, self._file = watch, None if file is None else DocumentFile(file)
        self._stop = threading.Event()
        self._listed = threading.Event()  # the API has answered or failed for the first time
        self._client: httpx.Client | None = None
        self._found = Found(None, "the API has not been asked yet")  # written by the thread

    def start(self, patience_seconds: float = 2.0) -> None:
        """Begins to watch, and waits a little for the first answer."""
        threading.Thread(target=self._run, name="control-watch", daemon=True).start()
        self._listed.wait(patience_seconds)

    def close(self) -> None:
        self._stop.set()
        if self._client is not None:
            self._client.close()

    def look(self) -> Found:
        found = self._found
        if not found.failure or self._file is None:
            return found
        mounted = self._file.look()
        return mounted if mounted.text is not None else Found(None, f"{found.failure}; {mounted.failure}")

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                for config_map in self._changes(self._watch):
                    text = ((config_map or {}).get("data") or {}).get(CONTROL_KEY)
                    self._found = Found(text)
                    self._listed.set()
            except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
                if not self._stop.is_set():
                    self._found = Found(None, f"{type(error).__name__}: {error}")
                    self._listed.set()
                    self._stop.wait(RETRY_SECONDS)

    def _changes(self, watch: WatchConfig) -> Iterator[Mapping[str, Any] | None]:
        """The ConfigMap now and after every change until the watch ends; None: there is none."""
        path = f"{watch.server}/api/v1/namespaces/{watch.namespace}/configmaps"
        select = {"fieldSelector": f"metadata.name={watch.config_map}"}
        headers = {"Authorization": f"Bearer {watch.token_file.read_text(encoding='ascii').strip()}"}
        client = self._connect(watch)
        answer = client.get(path, params=select, headers=headers)
        answer.raise_for_status()
        listed = answer.json()
        yield listed["items"][0] if listed["items"] else None
        version = listed["metadata"]["resourceVersion"]
        follow = {"watch": "1", "resourceVersion": version, "timeoutSeconds": str(WATCH_SECONDS)}
        with client.stream("GET", path, params={**select, **follow}, headers=headers) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return  # too old a version, mostly: begin afresh
                yield None if event["type"] == "DELETED" else event["object"]

    def _connect(self, watch: WatchConfig) -> httpx.Client:
        if self._client is None:
            context = ssl.create_default_context(cafile=str(watch.ca_file))
            timeout = httpx.Timeout(5.0, read=WATCH_SECONDS + 10.0)
            self._client = httpx.Client(verify=context, timeout=timeout, trust_env=False)
        return self._client
