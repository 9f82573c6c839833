"""Signals and ports, on a whole process."""

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

SCRIPT = Path(__file__).with_name("stub_server.py")


@contextmanager
def process(tmp_path, *, port=0, step_seconds=0.01, drain_seconds=20.0):
    log = tmp_path / "stderr"
    command = [sys.executable, str(SCRIPT), str(port), str(step_seconds), str(drain_seconds)]
    with (
        log.open("w") as stderr,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=tmp_path) as child,
    ):
        try:
            yield child
        finally:
            child.kill()


def public_url(child):
    assert child.stdout is not None
    lines = [child.stdout.readline().strip() for _ in range(2)]
    assert lines[0].startswith("OpenAI API: http://127.0.0.1:")
    assert lines[1].startswith("admin API: http://127.0.0.1:")
    return lines[0].removeprefix("OpenAI API: ")


@contextmanager
def streams(url, number, max_tokens):
    """Texts of the streams, complete once the block is left; entered when each has begun."""
    texts = [""] * number
    begun = [threading.Event() for _ in range(number)]

    def read(index):
        body = {"model": "stub", "prompt": "Hello", "max_tokens": max_tokens, "stream": True}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False
        ) as response:
            for text in response.iter_text():
                texts[index] += text
                begun[index].set()

    threads = [threading.Thread(target=read, args=(i,)) for i in range(number)]
    for thread in threads:
        thread.start()
    assert all(event.wait(20) for event in begun)
    yield texts
    for thread in threads:
        thread.join(60)


def test_sigterm_lets_sixteen_streams_finish(tmp_path, events):
    with process(tmp_path) as child:
        url = public_url(child)
        with streams(url, 16, 120) as texts:
            child.send_signal(signal.SIGTERM)
            with httpx.Client(base_url=url, trust_env=False) as client:
                while (health := client.get("/health")).status_code == 200:
                    pass
                assert (health.status_code, health.json()) == (503, {"status": "draining"})
                refused = client.post("/v1/completions", json={"model": "stub", "prompt": "x"})
                assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        for text in texts:
            chunks = events(text)
            assert sum(len(chunk["choices"][0]["text"]) for chunk in chunks) == 120
            assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert child.wait(20) == 0


def test_drain_timeout_ends_streams_with_an_error_event(tmp_path, events):
    with process(tmp_path, step_seconds=0.05, drain_seconds=0.2) as child:
        with streams(public_url(child), 2, 500) as texts:
            child.send_signal(signal.SIGTERM)
        assert [events(text)[-1]["error"]["code"] for text in texts] == ["unavailable"] * 2
        assert child.wait(20) == 0


def test_second_signal_exits_at_once(tmp_path):
    with process(tmp_path, step_seconds=0.05, drain_seconds=300) as child:
        url = public_url(child)
        body = {"model": "stub", "prompt": "Hello", "max_tokens": 500, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60, trust_env=False):
            child.send_signal(signal.SIGINT)
            while httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                pass
            child.send_signal(signal.SIGTERM)
            assert child.wait(20) == 1


def test_accepted_connections_send_at_once():
    from kvpilot.engine.server.run import bind

    accepted = []

    async def main():
        listener = bind("127.0.0.1", 0, "port")

        def note(reader, writer):
            peer = writer.get_extra_info("socket")
            accepted.append(peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        async with await asyncio.start_server(note, sock=listener):
            reader, writer = await asyncio.open_connection(*listener.getsockname())
            assert await reader.read() == b""
            writer.close()

    asyncio.run(main())
    assert accepted != [0]
    assert len(accepted) == 1


def test_unknown_host_is_said():
    from kvpilot.engine.errors import ConfigError
    from kvpilot.engine.server.run import bind

    with pytest.raises(ConfigError, match=r"admin_port=0: cannot listen on 203\.0\.113\.1:0"):
        bind("203.0.113.1", 0, "admin_port")


def test_port_in_use_is_said_and_exits_with_1(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with process(tmp_path, port=port) as child:
            assert child.wait(30) == 1
    assert f"port={port}: cannot listen on 127.0.0.1:{port}" in (tmp_path / "stderr").read_text()


@pytest.mark.parametrize("port", [65536, -1])
def test_impossible_port(tmp_path, port):
    with process(tmp_path, port=port) as child:
        assert child.wait(30) == 1
    assert f"port={port} is invalid" in (tmp_path / "stderr").read_text()
