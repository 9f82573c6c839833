"""The real model behind the real servers, in this process, so that a test can look inside the engine."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.factory import build_engine
from kvpilot.engine.model.load import LoadedModel, load_model
from kvpilot.engine.server.run import ServerConfig, run_servers
from kvpilot.exporter.collector import EngineCollector, metrics_source

TOKEN = "a-token-for-tests-only"


@pytest.fixture(scope="session")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


@pytest.fixture
def run_model_server(smollm2: LoadedModel) -> Callable:
    """`with run_model_server(pool_bytes=...) as server`: its `engine`, `url`, `admin_url` and `admin_headers`."""

    @contextmanager
    def run(**config: object) -> Iterator[SimpleNamespace]:
        engine = build_engine(smollm2.llama, EngineConfig(**{"knobs": Knobs(max_batch=32), **config}))
        registry = CollectorRegistry()
        EngineCollector(engine.snapshot, model_name="smollm2", info={}, registry=registry)
        server = SimpleNamespace(engine=engine, admin_headers={"Authorization": f"Bearer {TOKEN}"})
        ready = threading.Event()

        async def main() -> None:
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            server.stop = lambda: loop.call_soon_threadsafe(stop.set)

            def on_ready(addresses: tuple[str, str]) -> None:
                server.url, server.admin_url = addresses
                ready.set()

            settings = ServerConfig(
                model_name="smollm2", admin_token=TOKEN, port=0, admin_port=0, drain_seconds=60
            )
            source = metrics_source(registry)
            await run_servers(engine, smollm2.tokenizer, source, settings, stop=stop, on_ready=on_ready)

        thread = threading.Thread(target=asyncio.run, args=(main(),))
        thread.start()
        assert ready.wait(30)
        try:
            yield server
        finally:
            server.stop()
            thread.join(120)
            assert not thread.is_alive()

    return run
