"""Runs the public and the admin server in one event loop, and ends them in order."""

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

import uvicorn
from fastapi import FastAPI

from kvpilot.engine.async_engine import AsyncEngine
from kvpilot.engine.engine import Engine
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.model.tokenizer import Tokenizer
from kvpilot.engine.request import Request
from kvpilot.engine.server.admin import create_admin_app
from kvpilot.engine.server.app import create_app
from kvpilot.engine.server.openai import MetricsSource
from kvpilot.engine.server.recorder import TrafficRecorder
from kvpilot.engine.server.tracing import RequestTracer, open_provider

log = logging.getLogger(__name__)

SWITCH_INTERVAL_SECONDS = 0.001  # of the GIL: at Python's 5 ms each of an answer's writes may wait that long
LAST_BYTES_SECONDS = 5  # for answers that are complete to reach slow clients


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where to listen; port 0 takes a free one. `admin_token` is what `resolve_token` gave."""

    model_name: str
    admin_token: str = field(repr=False)
    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int = 8001
    drain_seconds: float = 30.0  # for running requests to end after SIGTERM
    record: Path | None = None  # a trace of the requests is appended here


class Addresses(NamedTuple):
    """Base URLs."""

    public: str
    admin: str


class _Server(uvicorn.Server):
    """Signals are the business of `serve`: uvicorn would stop listening while /health must say "draining"."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(engine: Engine, tokenizer: Tokenizer, metrics: MetricsSource, config: ServerConfig) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. Prints both addresses once they answer.

    The first signal drains: running requests end, new ones get 503. A second one exits at once.
    """
    sys.setswitchinterval(SWITCH_INTERVAL_SECONDS)
    try:
        asyncio.run(_serve_until_signal(engine, tokenizer, metrics, config))
    except ConfigError as error:
        log.error("%s", error)
        return 1
    return 0


async def _serve_until_signal(
    engine: Engine, tokenizer: Tokenizer, metrics: MetricsSource, config: ServerConfig
) -> None:
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            log.warning("second signal: exit without draining")
            os._exit(1)
        log.info("draining for at most %g seconds", config.drain_seconds)
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await run_servers(engine, tokenizer, metrics, config, stop=stop, on_ready=_print_addresses)


def _print_addresses(addresses: Addresses) -> None:
    print(f"OpenAI API: {addresses.public}\nadmin API: {addresses.admin}", flush=True)


async def run_servers(
    engine: Engine,
    tokenizer: Tokenizer,
    metrics: MetricsSource,
    config: ServerConfig,
    *,
    stop: asyncio.Event,
    on_ready: Callable[[Addresses], None],
) -> None:
    """Serve until `stop` is set, then drain. ConfigError if an address cannot be bound."""
    with contextlib.ExitStack() as stack:
        public = stack.enter_context(bind(config.host, config.port, "port"))
        admin = stack.enter_context(bind(config.admin_host, config.admin_port, "admin_port"))
        _warn_if_exposed(config.admin_host)
        recorder = None if config.record is None else stack.enter_context(_recorder(engine, config.record))
        tracer = _tracer(engine, config.model_name)
        listeners = [one.record for one in (recorder, tracer) if one is not None]
        async_engine = AsyncEngine(engine, tokenizer, on_end=partial(_tell, listeners) if listeners else None)
        app = create_app(async_engine, tokenizer, config.model_name, metrics)
        admin_app = create_admin_app(async_engine, config.admin_token)
        servers = [_server(app), _server(admin_app)]
        async_engine.start()
        tasks = [
            asyncio.create_task(server.serve([listener]))
            for server, listener in zip(servers, (public, admin), strict=True)
        ]
        while not all(server.started for server in servers) and not any(task.done() for task in tasks):
            await asyncio.sleep(0.01)
        on_ready(Addresses(_url(public), _url(admin)))
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait([stopped, *tasks], return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        aborted = await async_engine.drain(config.drain_seconds)
        if aborted:
            log.warning(
                "%d requests were aborted after %g seconds of draining", aborted, config.drain_seconds
            )
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)
        await async_engine.close()
        if tracer is not None:
            await asyncio.to_thread(tracer.close)


def _tell(listeners: list[Callable[[Request], None]], request: Request) -> None:
    for listener in listeners:
        listener(request)


def _tracer(engine: Engine, model_name: str) -> RequestTracer | None:
    provider = open_provider("kvpilot-engine")
    return None if provider is None else RequestTracer(provider, model_name=model_name, clock=engine.clock)


def _recorder(engine: Engine, path: Path) -> TrafficRecorder:
    return TrafficRecorder(path, page_size=engine.config.page_size, clock_offset=time.time() - engine.clock())


def _server(app: FastAPI) -> _Server:
    return _Server(
        uvicorn.Config(
            app,
            lifespan="off",
            access_log=False,
            log_config=None,  # the process decides where logs go
            log_level="warning",
            timeout_graceful_shutdown=LAST_BYTES_SECONDS,
            ws="none",
        )
    )


def bind(host: str, port: int, name: str) -> socket.socket:
    """A listening socket; ConfigError names the setting."""
    if not 0 <= port <= 65535:  # getaddrinfo would take it modulo 65536
        raise ConfigError(f"{name}={port} is invalid: expected a port in [0, 65535], 0 for a free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # The protocol is named (create_server leaves it at 0), or asyncio would not set TCP_NODELAY on what
        # it accepts, and answers in two writes would wait 40 ms for a delayed ACK.
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{name}={port}: cannot listen on {host}:{port}: {error.strerror}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise ConfigError(f"{name}={port}: cannot listen on {host}:{port}: {error.strerror}") from error
    listener.setblocking(False)
    return listener


def _warn_if_exposed(admin_host: str) -> None:
    with contextlib.suppress(ValueError):  # a name
        if not ip_address(admin_host).is_loopback:
            log.warning("the admin API listens on %s, which is not loopback", admin_host)


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
