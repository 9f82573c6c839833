"""Engines whose decisions can be watched."""

from collections.abc import Iterator

import pytest

from kvpilot.engine.engine import Engine
from kvpilot.engine.kv.cache import KVCache
from kvpilot.engine.kv.idle import IdlePages
from kvpilot.engine.scheduler import Scheduler


class OpenIdlePages(IdlePages):
    """Compiled methods cannot be replaced on an object; those of an interpreted subclass can, to watch them."""


class OpenCache(KVCache):
    """As OpenIdlePages."""

    idle_class = OpenIdlePages


class OpenScheduler(Scheduler):
    """As OpenIdlePages."""


@pytest.fixture(scope="module", autouse=True)
def open_engine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "cache_class", OpenCache)
        patch.setattr(Engine, "scheduler_class", OpenScheduler)
        yield
