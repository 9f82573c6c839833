"""The sidecar's side: the control document through the API within a second, or from a mounted file.

The kubelet refreshes a mounted ConfigMap about once a minute. With a service-account token the sidecar also watches
that one ConfigMap. Plain HTTP does for one GET: the client library takes some 35 MB more.
"""

import json
import logging
import os
import ssl
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

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


class _Answer(NamedTuple):
    text: str | None  # None: there is no document, or a failure
    failure: str = ""


class ControlSource:
    """While the API answers, what it says counts, otherwise the file.

    `document` is the last one that was understood. One with a lower revision, a bad one, or none at all does not
    replace it: `problem` then says what is wrong, and the caller holds.
    """

    def __init__(self, watch: WatchConfig, *, file: Path | None = None) -> None:
        self.document: ControlDocument | None = None
        self.problem = ""
        self._watch, self._file = watch, file
        self._stop = threading.Event()
        self._listed = threading.Event()  # the API has answered or failed for the first time
        self._client: httpx.Client | None = None
        self._answer: _Answer = _Answer(
            text=None, failure="the API has not been asked yet"
        )  # written by the thread
        self._seen: _Answer | None = None

    def start(self, patience_seconds: float = 2.0) -> None:
        """Begins to watch, and waits a little for the first answer."""
        threading.Thread(target=self._run, name="control-watch", daemon=True).start()
        self._listed.wait(patience_seconds)

    def close(self) -> None:
        self._stop.set()
        if self._client is not None:
            self._client.close()

    def refresh(self) -> bool:
        """Whether another document is in force than before. Never waits for the network, never raises."""
        answer = self._answer
        if answer.failure and self._file is not None:
            answer = _read(self._file, answer.failure)
        if answer == self._seen:
            return False
        self._seen = answer
        try:
            document = self._understand(answer)
        except ControlDocumentError as error:
            self._complain(str(error))
            return False
        self._complain("")
        changed, self.document = self.document != document, document
        return changed

    def _understand(self, answer: "_Answer") -> ControlDocument:
        where = f"ConfigMap {self._watch.config_map}"
        if answer.text is None:
            raise ControlDocumentError(
                f"{where}: {answer.failure or 'there is none with a control document'}"
            )
        document = parse_control_document(answer.text)
        if self.document is not None and document.revision < self.document.revision:
            raise ControlDocumentError(
                f"{where}: revision {document.revision} is older than {self.document.revision}, which stays in force"
            )
        return document

    def _complain(self, problem: str) -> None:
        if problem and problem != self.problem:
            log.warning("%s", problem)
        self.problem = problem

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                for config_map in self._changes(self._watch):
                    text = ((config_map or {}).get("data") or {}).get(CONTROL_KEY)
                    self._answer = _Answer(text=text)
                    self._listed.set()
            except (httpx.HTTPError, OSError, ValueError, RuntimeError) as error:
                if not self._stop.is_set():
                    self._answer = _Answer(text=None, failure=f"{type(error).__name__}: {error}")
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


def _read(path: Path, failure: str) -> _Answer:
    """The mounted file in place of an API that does not answer."""
    try:
        return _Answer(text=path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        return _Answer(text=None, failure=f"{failure}; {path}: {error}")
