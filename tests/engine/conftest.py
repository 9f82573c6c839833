"""An engine without a model: a stub runner, a virtual clock, no page bytes."""

import random
from collections.abc import Callable, Iterator

import pytest

from kvpilot.engine.config import EngineConfig
from kvpilot.engine.engine import Engine
from kvpilot.engine.kv.cache import KVCache
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.storage import NoStorage
from kvpilot.engine.request import SampledToken, ScheduledRequest
from kvpilot.engine.scheduler import Scheduler

SHAPE = PageShape(num_layers=2, num_kv_heads=1, head_dim=64, page_size=8)
SLOT_BYTES = SHAPE.num_values * 2


class OpenCache(KVCache):
    """Compiled methods cannot be replaced on an object; those of an interpreted subclass can, to watch them."""


class OpenScheduler(Scheduler):
    """As OpenCache."""


@pytest.fixture(scope="module", autouse=True)
def open_engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "cache_class", OpenCache)
        patch.setattr(Engine, "scheduler_class", OpenScheduler)
        yield


class StubRunner:
    """Draws pseudo-random tokens; checks what the interface promises to a runner."""

    def __init__(self, page_size: int) -> None:
        self._random = random.Random(0)
        self._page_size = page_size

    def execute(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        for request, start, num_new, _ in batch:
            end = start + num_new
            assert len(request.pages) * self._page_size >= end, "a token without a page"
            open_pages = request.pages[start // self._page_size :]
            assert all(not page.is_sealed and page.level == 0 for page in open_pages), (
                "writing to a sealed page"
            )
        return [SampledToken(self._random.randrange(100)) if entry.samples else None for entry in batch]


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def make_engine(clock: VirtualClock) -> Callable[..., Engine]:
    def make(num_slots: int = 32, **config: object) -> Engine:
        defaults = {"page_size": SHAPE.page_size, "prefill_chunk": 32, "tail_tokens": 16}
        settings = EngineConfig(pool_bytes=num_slots * SLOT_BYTES, **{**defaults, **config})
        return Engine(settings, SHAPE, StubRunner(SHAPE.page_size), NoStorage(), clock=clock)

    return make
