"""A server as a child process on free loopback ports: for the demo, the benchmarks and the end-to-end tests."""

import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.server.token import ENVIRONMENT_VARIABLE


class LaunchError(KVPilotError):
    """The server did not come up, or died; the message holds the tail of its log."""


@dataclass(frozen=True, kw_only=True)
class ServerProcess:
    """`autotune serve` as a child of this process."""

    process: subprocess.Popen[bytes]
    url: str
    admin_url: str
    token: str
    token_file: Path
    log_path: Path

    def tail(self, lines: int = 15) -> str:
        """The last lines that it wrote to stdout and stderr."""
        text = self.log_path.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def check_alive(self) -> None:
        code = self.process.poll()
        if code is not None:
            raise LaunchError(
                f"the server ended with code {code}; the end of {self.log_path}:\n{self.tail()}"
            )

    def stop(self, grace_seconds: float = 10.0) -> int:
        """SIGTERM, after the grace SIGKILL; its exit code (negative: the signal)."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(grace_seconds)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait()


@contextmanager
def launched(
    serve_args: Sequence[str], *, directory: Path, name: str = "server", ready_seconds: float = 300.0
) -> Iterator[ServerProcess]:
    """Starts `autotune serve` with these further arguments, yields when /health answers 200, stops at exit.

    Token and log are written to `directory`. Raises LaunchError if it ends or is not ready in time.
    """
    directory.mkdir(parents=True, exist_ok=True)
    token_file, log_path = directory / f"{name}.token", directory / f"{name}.log"
    token = secrets.token_urlsafe(24)
    token_file.unlink(missing_ok=True)
    token_file.touch(mode=0o600)
    token_file.write_text(token, encoding="ascii")
    port, admin_port = _free_ports(2)
    ports = ["--port", str(port), "--admin-port", str(admin_port), "--admin-token-file", str(token_file)]
    command = [sys.executable, "-P", "-m", "kvpilot.agent.cli", "serve", *ports, *serve_args]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={k: v for k, v in os.environ.items() if k != ENVIRONMENT_VARIABLE},  # the file's token counts
            start_new_session=True,  # Ctrl-C is for the parent, which then stops the server in order
        )
    server = ServerProcess(
        process=process,
        url=f"http://127.0.0.1:{port}",
        admin_url=f"http://127.0.0.1:{admin_port}",
        token=token,
        token_file=token_file,
        log_path=log_path,
    )
    try:
        _wait_ready(server, ready_seconds)
        yield server
    finally:
        server.stop()
        token_file.unlink(missing_ok=True)


def _wait_ready(server: ServerProcess, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with httpx.Client(timeout=2.0, trust_env=False) as http:
        while time.monotonic() < deadline:
            server.check_alive()
            try:
                if http.get(f"{server.url}/health").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
    raise LaunchError(f"the server was not ready after {seconds:g} s; the end of its log:\n{server.tail()}")


def _free_ports(count: int) -> list[int]:
    """Ports free a moment ago: a server that loses the race dies, and LaunchError shows why."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
