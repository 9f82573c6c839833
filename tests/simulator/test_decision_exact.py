"""The simulator books many steps at once; the engine takes them one by one. Both must decide the same."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.kv.eviction import POLICIES
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.storage import CountingStorage, NoStorage
from kvpilot.engine.request import Request
from kvpilot.engine.step_features import FeatureReader
from kvpilot.env.simulator.clock import VirtualClock
from kvpilot.env.simulator.core import SimulatedRunner
from kvpilot.env.simulator.engine import SimulatedEngine
from kvpilot.env.simulator.latency import LatencyProfile

SHAPE = PageShape(num_layers=2, num_kv_heads=1, head_dim=64, page_size=8)
SLOT_BYTES = SHAPE.num_values * 2
PROFILE = LatencyProfile(
    name="test",
    fixed=0.01,
    prefill_token=1e-4,
    prefill_pair=1e-6,
    sequence=1e-3,
    kv_byte={"bf16": 1e-8, "int8": 1e-8, "int4": 1.5e-8},
    convert={"int8": 1e-3, "int4": 1e-3},
    moved_byte=1e-9,
    origin={},
)

arrivals = st.tuples(
    st.integers(0, 400).map(lambda n: n / 64),  # seconds
    st.integers(0, 3),  # conversation
    st.integers(1, 100),  # prompt tokens
    st.integers(1, 80),  # output tokens
)
knob_changes = st.tuples(
    st.integers(0, 900).map(lambda n: n / 64),
    st.fixed_dictionaries(
        {},
        optional={
            "ttl_seconds": st.sampled_from([0.0, 0.5, 2.0, 86400.0]),
            "size_factor": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
            "max_batch": st.integers(1, 8),
            "kv_level": st.integers(0, 2),
        },
    ),
)


def record(engine: Engine) -> list[tuple]:
    """Every decision with its time and pages, in order; runs of equal steps are joined."""
    log: list[tuple] = []
    scheduler, cache = engine.scheduler, engine.cache
    time = engine.clock

    def watch(owner: object, name: str, describe) -> None:
        inner = getattr(owner, name)

        def wrapped(*args, **kwargs):
            log.append((time(), name, *describe(*args)))
            return inner(*args, **kwargs)

        setattr(owner, name, wrapped)

    watch(
        scheduler, "_book_admission", lambda r, now, take: (r.request_id, r.num_computed, take, len(r.pages))
    )
    watch(scheduler, "_preempt", lambda r, now: (r.request_id,))
    watch(scheduler, "finish", lambda r, reason, now: (r.request_id, reason, r.num_tokens))
    watch(cache, "_release", lambda page, now: (page.page_id, page.state, page.level))
    watch(cache, "_step_down", lambda page: (page.page_id, page.level))
    watch(cache.idle, "_enqueue", lambda page: (page.page_id, page.last_use, page.state))
    watch(cache, "seal", lambda pages, index, block: (pages[index].page_id, index, block))
    commit = scheduler.commit

    def watched_commit(batch, sampled, now, repeats=1):
        what = [(entry.request.request_id, entry.num_new, entry.samples) for entry in batch]
        for _ in range(repeats):
            log.append(("step", what, len(scheduler.running), len(scheduler.waiting)))
        return commit(batch, sampled, now, repeats)

    scheduler.commit = watched_commit
    return log


def drive(engine: Any, arrivals: list, changes: list) -> None:
    """Feed requests and knob changes at their times, as the simulator and a live server do: before a step."""
    clock = engine.clock
    pending, changes = sorted(arrivals), sorted(changes, key=lambda change: change[0])
    number = 0
    while pending or changes or engine.has_work():
        while pending and pending[0][0] <= clock.now:
            at, session, num_prompt, num_output = pending.pop(0)
            engine.submit(
                Request(
                    request_id=f"r{number}",
                    num_prompt_tokens=num_prompt,
                    max_tokens=num_output,
                    arrival_time=at,
                    block_hash=lambda index, session=session: (session, index),
                )
            )
            number += 1
        while changes and changes[0][0] <= clock.now:
            engine.patch_knobs(changes.pop(0)[1])
        upcoming = [event[0] for event in (*pending[:1], *changes[:1])]
        engine.next_event = min(upcoming, default=float("inf"))
        if engine.has_work():
            engine.step()
            engine.check_integrity()
        elif upcoming:
            clock.now = max(clock.now, engine.next_event)


def build(simulated: bool, **config: Any) -> Engine:
    clock = VirtualClock()
    settings = EngineConfig(page_size=8, prefill_chunk=32, tail_tokens=16, max_batch_ceiling=8, **config)
    if simulated:
        return SimulatedEngine(settings, SHAPE, PROFILE, clock)
    storage = CountingStorage(NoStorage(), len(settings.ladder))
    runner = SimulatedRunner(PROFILE, clock, settings.ladder)
    engine = Engine(settings, SHAPE, runner, storage, clock=clock)
    runner.features = FeatureReader(engine.pool, storage)
    return engine


@settings(max_examples=150, deadline=None)
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=20),
    changes=st.lists(knob_changes, max_size=6),
    num_slots=st.sampled_from([20, 32, 64]),
    eviction=st.sampled_from(sorted(POLICIES)),
    starvation=st.sampled_from([0.0, 1.0, 300.0]),
    reserve=st.sampled_from([0.0, 0.1]),
)
def test_simulator_and_engine_decide_the_same(arrivals, changes, num_slots, eviction, starvation, reserve):
    runs = []
    for simulated in (False, True):
        engine = build(
            simulated,
            pool_bytes=num_slots * SLOT_BYTES,
            eviction=eviction,
            starvation_seconds=starvation,
            reserve_fraction=reserve,
            knobs=Knobs(max_batch=4),
        )
        log = record(engine)
        drive(engine, arrivals, changes)
        runs.append(SimpleNamespace(log=log, engine=engine, snapshot=engine.snapshot()))
    stepwise, bulk = runs
    for one, other in zip(stepwise.log, bulk.log, strict=False):
        assert one == other
    assert len(stepwise.log) == len(bulk.log)
    assert stepwise.engine.clock.now == bulk.engine.clock.now
    assert stepwise.snapshot.values == bulk.snapshot.values
    for name, histogram in stepwise.snapshot.histograms.items():
        assert histogram.counts == bulk.snapshot.histograms[name].counts, name
        assert histogram.sum == pytest.approx(bulk.snapshot.histograms[name].sum)


def test_the_simulator_takes_few_steps_for_many_tokens():
    engine = build(True, pool_bytes=64 * SLOT_BYTES, knobs=Knobs(max_batch=4))
    log = record(engine)
    calls = 0
    step = engine.step

    def counted_step():
        nonlocal calls
        calls += 1
        return step()

    engine.step = counted_step
    drive(engine, [(0.0, 0, 9, 400)], [])
    assert sum(entry[0] == "step" for entry in log) == 400 + 1 - 1
    assert calls < 400 / 8 + 10
