"""A request may say how coarse its KV pages may become, whatever the knob `kv_level` allows."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpilot.engine.config import Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.errors import RequestError
from kvpilot.engine.kv.page import PageState
from kvpilot.engine.request import FinishReason, Request, SamplingParams

PAGE = 8  # tokens, see conftest
COARSEST = Knobs(kv_level=2, max_batch=8)


def add(engine: Engine, name: str, prompt: range, num_output: int, level: int | None = None) -> Request:
    return engine.add_request(name, list(prompt), SamplingParams(max_tokens=num_output), max_kv_level=level)


def step(engine: Engine, clock) -> None:
    engine.step()
    engine.check_integrity()
    clock.now += 0.1


def run_all(engine: Engine, clock, *requests: Request) -> dict[str, int]:
    """Step until these end; the coarsest level that a page of each ever had."""
    coarsest = {request.request_id: 0 for request in requests}
    while any(request.finish_reason is None for request in requests):
        step(engine, clock)
        assert clock.now < 1000, "no progress"
        for request in engine.scheduler.running:
            levels = [page.level for page in request.pages]
            coarsest[request.request_id] = max([coarsest.get(request.request_id, 0), *levels])
    assert all(request.finish_reason is FinishReason.LENGTH for request in requests)
    return coarsest


@pytest.mark.parametrize("level", [0, 1, 2])
def test_growth_takes_the_neighbours_precision_only(make_engine, clock, level):
    engine = make_engine(32, knobs=COARSEST)
    lax = add(engine, "lax", range(80), 60)
    strict = add(engine, "strict", range(1000, 1080), 60, level)
    coarsest = run_all(engine, clock, lax, strict)
    assert engine.snapshot().value("preemptions") == 0
    assert coarsest["lax"] > 0
    assert coarsest["strict"] <= level


def test_who_may_not_be_stepped_down_is_preempted(make_engine, clock):
    engine = make_engine(26, knobs=COARSEST)
    first = add(engine, "first", range(80), 60, 0)
    second = add(engine, "second", range(1000, 1080), 60, 0)
    assert run_all(engine, clock, first, second) == {"first": 0, "second": 0}
    assert second.num_preemptions > 0
    assert first.num_preemptions == 0


def make_coarse(engine: Engine, clock) -> Request:
    """Two requests that do not fit at full precision; while they run, pages of both are stepped down."""
    old = add(engine, "old", range(80), 80)
    add(engine, "neighbour", range(1000, 1080), 80)
    while not any(page.level > 0 for page in old.pages):
        step(engine, clock)
        assert engine.has_work()
    return old


def test_a_coarse_page_in_the_cache_is_a_miss_and_is_replaced(make_engine, clock):
    engine = make_engine(26, knobs=COARSEST)
    run_all(engine, clock, make_coarse(engine, clock))
    run_all(engine, clock, *list(engine.scheduler.running))
    known = engine.cache.match(add(engine, "lax", range(80), 1).block_hash, 9)
    coarse = next(i for i, page in enumerate(known) if page.level > 0)
    assert len(known) == 9, "the whole prompt is cached"
    engine.abort("lax")

    strict = add(engine, "strict", range(80), 1, 0)
    run_all(engine, clock, strict)
    assert strict.num_cached == coarse * PAGE
    again = add(engine, "again", range(80), 1, 0)
    run_all(engine, clock, again)
    assert again.num_cached == 9 * PAGE


def test_beside_coarse_pages_in_use_the_finer_ones_are_shared_from_then_on(make_engine, clock):
    engine = make_engine(26, knobs=COARSEST)
    old = make_coarse(engine, clock)
    engine.abort("neighbour")
    coarse = next(i for i, page in enumerate(old.pages) if page.level > 0)
    strict = add(engine, "strict", range(80), 20, 0)
    while not strict.is_decoding:
        step(engine, clock)
        assert old.finish_reason is None
    assert strict.num_cached == coarse * PAGE
    found = engine.cache.match(strict.block_hash, 9, 0)
    assert len(found) == 9
    replaced = [index for index in range(9) if old.pages[index].level > 0]
    assert replaced
    assert all(found[index] is strict.pages[index] for index in replaced)


def test_of_those_who_share_a_page_the_strictest_counts_while_it_runs(make_engine, clock):
    engine = make_engine(60, knobs=COARSEST)
    run_all(engine, clock, add(engine, "first", range(80), 1))
    names = {"none": None, "one": 1, "zero": 0}
    requests = [add(engine, name, range(80), 200, level) for name, level in names.items()]
    for _ in range(5):
        step(engine, clock)
    shared = requests[0].pages[5]
    assert shared.refs == 3
    allowed = [engine.pool.floor_level(shared)]
    for name in ("zero", "one"):
        engine.abort(name)
        engine.check_integrity()
        allowed.append(engine.pool.floor_level(shared))
    assert allowed == [0, 1, 2]
    engine.abort("none")
    assert shared.refs == 0
    assert shared.hash is not None
    assert engine.pool.floor_level(shared) == 2, "an idle page has no limit"


@pytest.mark.parametrize("level", [-1, 3])
def test_a_level_that_the_ladder_does_not_have(make_engine, level):
    engine = make_engine()
    with pytest.raises(
        RequestError, match=rf"max_kv_level={level} .*expected 0 to 2.*leave it out"
    ) as caught:
        add(engine, "a", range(10), 1, level)
    assert caught.value.field == "max_kv_level"
    assert not engine.has_work()


limits = st.sampled_from([None, None, 0, 1, 2])
arrivals = st.tuples(
    st.integers(0, 30),  # steps until it arrives
    st.integers(0, 2),  # conversation
    st.integers(1, 120),  # prompt tokens
    st.integers(1, 60),  # output tokens
    limits,
    st.booleans(),  # aborted some steps later
)
knob_changes = st.fixed_dictionaries(
    {"kv_level": st.integers(0, 2)},
    optional={
        "ttl_seconds": st.sampled_from([0.0, 20.0]),
        "size_factor": st.sampled_from([0.0, 0.5, 1.0]),
        "max_batch": st.integers(1, 8),
    },
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=20),
    schedule=st.lists(st.tuples(st.integers(0, 60), knob_changes), max_size=6),
    num_slots=st.sampled_from([26, 40]),
    starvation=st.sampled_from([0.0, 5.0, 300.0]),
)
def test_no_page_in_use_is_ever_coarser_than_its_requests_allow(
    make_engine, clock, arrivals, schedule, num_slots, starvation
):
    clock.now = 0.0
    engine: Engine = make_engine(
        num_slots, knobs=COARSEST, max_batch_ceiling=8, starvation_seconds=starvation
    )
    schedule_step = engine.scheduler.schedule

    def checked_schedule(now: float):
        batch = schedule_step(now)
        check_levels(engine)
        return batch

    engine.scheduler.schedule = checked_schedule
    pending = sorted(arrivals, key=lambda arrival: arrival[0])
    changes = sorted(schedule, key=lambda change: change[0])
    requests: list[Request] = []
    aborts: list[tuple[int, str]] = []
    number = 0
    while pending or engine.has_work():
        while pending and pending[0][0] <= number:
            _, session, num_prompt, num_output, level, is_aborted = pending.pop(0)
            name = f"r{len(requests)}"
            prompt = range(session * 1000, session * 1000 + min(num_prompt, engine.max_model_len - 1))
            requests.append(add(engine, name, prompt, num_output, level))
            if is_aborted:
                aborts.append((number + 7, name))
        while changes and changes[0][0] <= number:
            engine.patch_knobs(changes.pop(0)[1])
        while aborts and aborts[0][0] <= number:
            engine.abort(aborts.pop(0)[1])
        engine.step()
        check_levels(engine)
        clock.now += 0.25
        number += 1
        assert number < 20_000, "no progress"
    assert all(request.finish_reason is not None for request in requests)
    assert engine.pool.num_pages(PageState.LIVE) == 0


def check_levels(engine: Engine) -> None:
    engine.check_integrity()
    for request in engine.scheduler.running:
        if request.max_kv_level is not None:
            assert all(page.level <= request.max_kv_level for page in request.pages)
