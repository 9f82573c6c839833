"""The HTTP of sidecar and operator: /metrics for Prometheus, /healthz for the kubelet. Read only, no token."""

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from kvpilot.engine.errors import ConfigError

log = logging.getLogger("kvpilot.agent")


class Health(Protocol):
    """Heartbeat, or another sign of life."""

    @property
    def age_seconds(self) -> float:
        """Since the last one."""
        ...

    @property
    def is_healthy(self) -> bool: ...


class Heartbeat:
    """Whether the loop still turns: healthy while the last tick is younger than `patience_seconds`."""

    def __init__(self, patience_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.patience_seconds, self._clock = patience_seconds, clock
        self._last = clock()

    def beat(self) -> None:
        self._last = self._clock()

    @property
    def age_seconds(self) -> float:
        return self._clock() - self._last

    @property
    def is_healthy(self) -> bool:
        return self.age_seconds <= self.patience_seconds


class ControlServer:
    """A context manager; listens from entry to exit. `address` has the port that was taken for 0. Without a registry
    there is no /metrics; `setting` is what a ConfigError calls the address by."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry | None,
        health: Health,
        setting: str = "listen",
    ) -> None:
        try:
            self._server = make_server(
                host, port, _app(registry, health), server_class=_Server, handler_class=_Quiet
            )
        except OSError as error:
            raise ConfigError(
                f"{setting}='{host}:{port}' cannot be used ({error.strerror}): choose another port"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="control-server", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._server.server_address[:2]
        return str(host), int(port)

    def __enter__(self) -> "ControlServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    timeout = 10  # of a client that sends nothing

    def log_message(self, format: str, *args: Any) -> None:
        log.debug(format, *args)


def _app(registry: CollectorRegistry | None, health: Health) -> Any:
    metrics = None if registry is None else make_wsgi_app(registry)

    def app(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        match environ.get("PATH_INFO"):
            case "/metrics" if metrics is not None:
                return metrics(environ, start_response)
            case "/healthz":
                status = "200 OK" if health.is_healthy else "503 Service Unavailable"
                body = {"ok": health.is_healthy, "seconds_since_tick": round(health.age_seconds, 3)}
                start_response(status, [("Content-Type", "application/json")])
                return [json.dumps(body).encode() + b"\n"]
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"only /healthz\n" if metrics is None else b"only /metrics and /healthz\n"]

    return app
