import asyncio
import importlib.util
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import httpx
import pytest

STUB_SERVER = Path(__file__).with_name("stub_server.py")


@pytest.fixture(scope="session")
def stub() -> ModuleType:
    spec = importlib.util.spec_from_file_location("stub_server", STUB_SERVER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def run_server(stub: ModuleType) -> Callable[..., AbstractContextManager[SimpleNamespace]]:
    """`with run_server() as server`: a server over a stub runner on free ports."""
    return partial(_running, stub)


@contextmanager
def _running(
    stub: ModuleType, *, drain_seconds: float = 5.0, record: Path | None = None, **changes: object
) -> Iterator[SimpleNamespace]:
    from kvpilot.engine.server.run import ServerConfig, run_servers

    tokenizer = stub.make_tokenizer()
    runner = stub.StubRunner(tokenizer)
    engine = stub.make_engine(runner, **changes)
    ready = threading.Event()
    server = SimpleNamespace(engine=engine, runner=runner, tokenizer=tokenizer, crashed=None)

    async def main() -> None:
        stop = asyncio.Event()
        loop = asyncio.get_running_loop()
        server.stop = lambda: loop.call_soon_threadsafe(stop.set)

        def on_ready(addresses: tuple[str, str]) -> None:
            server.url, server.admin_url = addresses
            ready.set()

        config = ServerConfig(
            model_name=stub.MODEL,
            admin_token=stub.TOKEN,
            port=0,
            admin_port=0,
            drain_seconds=drain_seconds,
            record=record,
        )
        await run_servers(engine, tokenizer, stub.make_metrics(engine), config, stop=stop, on_ready=on_ready)

    def run() -> None:
        try:
            asyncio.run(main())
        except Exception as error:  # noqa: BLE001 - raised again below, in the test's thread
            server.crashed = error
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    server.thread = thread
    assert ready.wait(20)
    if server.crashed is None:
        with httpx.Client(base_url=server.url, timeout=30, trust_env=False) as client:
            admin_headers = {"Authorization": f"Bearer {stub.TOKEN}"}
            with httpx.Client(
                base_url=server.admin_url, timeout=30, trust_env=False, headers=admin_headers
            ) as admin:
                server.client, server.admin = client, admin
                yield server
        if thread.is_alive():  # else the test has stopped it
            server.stop()
    thread.join(20)
    assert not thread.is_alive()
    if server.crashed is not None:
        raise server.crashed


@pytest.fixture
def server(run_server: Callable[..., AbstractContextManager[SimpleNamespace]]) -> Iterator[SimpleNamespace]:
    with run_server() as server:
        yield server


@pytest.fixture(scope="session")
def events() -> Callable[[str], list[dict]]:
    """The JSON of the events of a stream; the last event must be [DONE]."""

    def parse(text: str) -> list[dict]:
        parts = text.split("\n\n")
        assert parts[-2:] == ["data: [DONE]", ""]
        assert all(part.startswith("data: ") for part in parts[:-1])
        return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]

    return parse


@pytest.fixture(scope="session")
def wait_until() -> Callable[[Callable[[], bool]], None]:
    """Polls a condition; fails after 20 seconds."""

    def wait(condition: Callable[[], bool]) -> None:
        tick = threading.Event()
        for _ in range(2000):
            if condition():
                return
            tick.wait(0.01)
        pytest.fail("the condition never came true")

    return wait
