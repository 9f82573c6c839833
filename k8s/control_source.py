"""The sidecar's side: the control document from a mounted file, and within a second through the API.

The kubelet refreshes a mounted ConfigMap about once a minute. With a service-account token the sidecar also watches
that one ConfigMap. Plain HTTP does for one GET: the client library would double the sidecar's memory.
"""

import json
import logging
import os
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from kvpilot.engine.errors import ConfigError
from kvpilot.k8s.control_document import (
    CONTROL_KEY,
    ControlDocument,
    ControlDocumentError,
    parse_control_document,
)

log = logging.getLogger(__name__)
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


def watch_config_in_pod(config_map: str, environment: Mapping[str, str] = os.environ) -> WatchConfig:
    """As a pod knows it: KUBERNETES_SERVICE_HOST and _PORT, and POD_NAMESPACE by the downward API."""
    try:
        host, port = environment["KUBERNETES_SERVICE_HOST"], environment["KUBERNETES_SERVICE_PORT"]
        namespace = environment["POD_NAMESPACE"]
    except KeyError as error:
        raise ConfigError(
            f"control_config_map={config_map!r} needs {error} in the environment of a pod"
        ) from error
    address = f"[{host}]" if ":" in host else host
    return WatchConfig(config_map=config_map, namespace=namespace, server=f"https://{address}:{port}")


class ControlSource:
    """The latest document that could be read. While the API answers it decides, otherwise the file does.

    None from `current` means that there is no document: the sidecar's own settings hold. After `error` the last
    good document stays in force.
    """

    def __init__(self, *, file: Path | None = None, watch: WatchConfig | None = None) -> None:
        if file is None and watch is None:
            raise ConfigError("control_file=None is invalid: expected a file, or a ConfigMap to watch")
        self._file, self._watch = file, watch
        self._stop, self._changed = threading.Event(), threading.Event()
        self._from_api: ControlDocument | None = None
        self._from_file: ControlDocument | None = None
        self._connected = False
        self._client: httpx.Client | None = None
        self._errors: dict[str, str] = {}  # by source

    @property
    def error(self) -> str | None:
        """What is wrong with the sources just now; None if nothing is."""
        return "; ".join(self._errors.values()) or None

    def start(self) -> None:
        """Begins to watch, if there is a ConfigMap to watch."""
        if self._watch is not None:
            threading.Thread(target=self._run, name="control-watch", daemon=True).start()

    def close(self) -> None:
        self._stop.set()
        self._changed.set()
        if self._client is not None:
            self._client.close()

    def current(self) -> ControlDocument | None:
        """Reads the file if the API does not answer; cheap, never waits, never raises."""
        if self._connected:
            return self._from_api
        if self._file is not None:
            self._from_file = self._read_file(self._file)
        newest = [each for each in (self._from_api, self._from_file) if each is not None]
        return max(newest, key=lambda document: document.revision, default=None)

    def wait(self, seconds: float) -> bool:
        """Until the watched document has changed, or `seconds` have passed. True: it has changed."""
        changed = self._changed.wait(seconds)
        self._changed.clear()
        return changed

    def _read_file(self, path: Path) -> ControlDocument | None:
        try:
            document = parse_control_document(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            self._errors.pop("file", None)
            return None
        except (OSError, UnicodeDecodeError, ControlDocumentError) as error:
            self._errors["file"] = f"{path}: {error}"
            return self._from_file
        self._errors.pop("file", None)
        return document

    def _run(self) -> None:
        assert self._watch is not None
        while not self._stop.is_set():
            try:
                for config_map in self._changes(self._watch):
                    self._take(config_map)
                    self._connected = True
                    self._errors.pop("api", None)
            except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
                if self._stop.is_set():
                    return
                self._connected = False
                self._errors["api"] = f"ConfigMap {self._watch.config_map}: {type(error).__name__}: {error}"
                log.warning("%s; the mounted file decides", self._errors["api"])
                self._stop.wait(RETRY_SECONDS)

    def _take(self, config_map: Mapping[str, Any] | None) -> None:
        text = ((config_map or {}).get("data") or {}).get(CONTROL_KEY)
        document = None
        if text is not None:
            try:
                document = parse_control_document(text)
                self._errors.pop("document", None)
            except ControlDocumentError as error:
                self._errors["document"] = str(error)
                log.warning("ConfigMap: %s; the last good document stays", error)
                return
        if document != self._from_api:
            self._from_api = document
            self._changed.set()

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
