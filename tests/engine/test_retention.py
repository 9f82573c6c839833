"""The life of a page, and what ttl_seconds, size_factor and kv_level do to it."""

import pytest

from kvpilot.engine.config import Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.kv.cache import Take
from kvpilot.engine.kv.idle import IDLE_STATES
from kvpilot.engine.kv.page import PageState
from kvpilot.engine.request import FinishReason, SamplingParams

PAGE = 8  # tokens, see conftest


def run(engine: Engine, clock, name: str, prompt: list[int], num_output: int = 1, salt: str = "") -> int:
    """Serve one request alone, a step every 0.1 s; the number of cached tokens it found."""
    request = engine.add_request(name, prompt, SamplingParams(max_tokens=num_output), cache_salt=salt)
    while request.finish_reason is None:
        engine.step()
        engine.check_integrity()
        clock.now += 0.1
    assert request.finish_reason == FinishReason.LENGTH
    return request.num_cached


def idle(engine: Engine) -> tuple[int, int]:
    """Retained and unprotected pages."""
    return engine.pool.num_pages(PageState.RETAINED), engine.pool.num_pages(PageState.UNPROTECTED)


def test_second_turn_finds_the_whole_pages_of_the_shared_prefix(make_engine, clock):
    engine = make_engine()
    prompt = list(range(20))
    request = engine.add_request("turn-1", prompt, SamplingParams(max_tokens=10))
    while engine.has_work():
        engine.step()
    tokens = list(request.tokens)
    # the last token drawn was never computed: 29 tokens are in pages, 3 pages of them are whole
    assert run(engine, clock, "turn-2", [*tokens, *range(5)]) == 3 * PAGE
    assert run(engine, clock, "other tenant", [*tokens, *range(5)], salt="b") == 0


def test_a_fully_cached_prompt_still_computes_its_last_page(make_engine, clock):
    engine = make_engine()
    run(engine, clock, "a", list(range(4 * PAGE)))
    assert run(engine, clock, "b", list(range(4 * PAGE))) == 3 * PAGE


def test_idle_pages_are_retained_until_their_ttl_is_over(make_engine, clock):
    engine = make_engine()
    engine.patch_knobs({"ttl_seconds": 10.0, "size_factor": 1.0})
    run(engine, clock, "a", list(range(3 * PAGE)))
    assert idle(engine) == (3, 0)
    clock.now += 9
    engine.cache.idle.tick(clock.now)
    assert idle(engine) == (3, 0)
    clock.now += 2
    engine.cache.idle.tick(clock.now)
    assert idle(engine) == (0, 3)
    assert engine.snapshot().value("pages_expired") == 3


def test_a_hit_refreshes_the_last_use(make_engine, clock):
    engine = make_engine()
    engine.patch_knobs({"ttl_seconds": 10.0, "size_factor": 1.0})
    run(engine, clock, "a", list(range(3 * PAGE)))
    clock.now += 9
    run(engine, clock, "b", list(range(3 * PAGE)))
    clock.now += 9
    engine.cache.idle.tick(clock.now)
    assert engine.pool.num_pages(PageState.RETAINED) == 3


def test_size_factor_keeps_the_most_recent_pages(make_engine, clock):
    engine = make_engine(num_slots=32)
    engine.patch_knobs({"ttl_seconds": 1000.0, "size_factor": 4.5 / 32})
    run(engine, clock, "old", list(range(100, 100 + 3 * PAGE)))
    run(engine, clock, "new", list(range(3 * PAGE)))
    assert idle(engine) == (4, 2)
    assert engine.snapshot().value("pages_over_budget") == 2
    assert run(engine, clock, "new again", list(range(3 * PAGE))) == 2 * PAGE, (
        "all of the new one was protected"
    )


def test_protection_is_regained_when_the_budget_grows(make_engine, clock):
    engine = make_engine(num_slots=32)
    engine.patch_knobs({"ttl_seconds": 1000.0, "size_factor": 2.5 / 32})
    run(engine, clock, "a", list(range(6 * PAGE)))
    assert idle(engine) == (2, 4)
    engine.patch_knobs({"size_factor": 1.0})
    run(engine, clock, "b", [7])
    assert idle(engine)[0] == 6
    clock.now += 1001
    engine.cache.idle.tick(clock.now)
    assert idle(engine)[0] == 0, "regained pages expire like the others"


def test_without_retention_the_knobs_protect_nothing(make_engine, clock):
    engine = make_engine()
    for knobs in ({"ttl_seconds": 0.0, "size_factor": 1.0}, {"ttl_seconds": 100.0, "size_factor": 0.0}):
        engine.patch_knobs(knobs)
        run(engine, clock, str(knobs), list(range(3 * PAGE)))
        assert engine.pool.num_pages(PageState.RETAINED) == 0


def test_retained_pages_count_as_occupied_for_a_waiting_request(make_engine, clock):
    """With somebody running, a newcomer that would need retained pages waits; without retention it is admitted."""
    for size_factor, admitted in ((1.0, False), (0.0, True)):
        engine = make_engine(num_slots=20)  # 16 pages usable
        engine.patch_knobs({"ttl_seconds": 1e4, "size_factor": size_factor})
        run(engine, clock, "cache", list(range(8 * PAGE)))
        engine.add_request("running", list(range(500, 500 + 4 * PAGE)), SamplingParams(max_tokens=64))
        engine.step()
        newcomer = engine.add_request("new", list(range(900, 900 + 6 * PAGE)), SamplingParams(max_tokens=1))
        engine.step()
        engine.check_integrity()
        assert bool(newcomer.pages or newcomer.finish_reason) is admitted


def test_retained_pages_yield_when_nothing_runs(make_engine, clock):
    engine = make_engine(num_slots=20)
    engine.patch_knobs({"ttl_seconds": 1e4, "size_factor": 1.0})
    run(engine, clock, "cache", list(range(8 * PAGE)))
    run(engine, clock, "new", list(range(900, 900 + 12 * PAGE)))
    assert engine.snapshot().value("retained_taken", Take.IDLE_ENGINE) == 4
    assert run(engine, clock, "again", list(range(8 * PAGE))) == 4 * PAGE, "leaves went, the prefix stayed"


def test_retained_pages_yield_to_growth_before_anybody_is_preempted(make_engine, clock):
    engine = make_engine(num_slots=20)
    engine.patch_knobs({"ttl_seconds": 1e4, "size_factor": 1.0})
    run(engine, clock, "cache", list(range(8 * PAGE)))
    run(engine, clock, "long", list(range(900, 900 + 7 * PAGE)), num_output=6 * PAGE)
    snapshot = engine.snapshot()
    assert snapshot.value("retained_taken", Take.GROWTH) > 0
    assert snapshot.value("preemptions") == 0


def test_a_starving_request_takes_retained_pages(make_engine, clock):
    engine = make_engine(num_slots=20, starvation_seconds=5.0)
    engine.patch_knobs({"ttl_seconds": 1e4, "size_factor": 1.0})
    run(engine, clock, "cache", list(range(8 * PAGE)))
    engine.add_request("running", list(range(500, 500 + 4 * PAGE)), SamplingParams(max_tokens=64))
    engine.step()
    newcomer = engine.add_request("new", list(range(900, 900 + 6 * PAGE)), SamplingParams(max_tokens=1))
    engine.step()
    assert not newcomer.pages
    clock.now += 6
    engine.step()
    engine.check_integrity()
    assert newcomer.pages or newcomer.finish_reason
    assert engine.snapshot().value("admissions_forced") == 1


def test_memory_is_taken_by_stepping_down_before_releasing(make_engine, clock):
    """kv_level decides how deep; retained pages are stepped down too, and nothing is lost until the floor."""
    lost = {}
    for kv_level in (0, 1, 2):
        engine = make_engine(num_slots=40)
        engine.patch_knobs({"kv_level": kv_level, "ttl_seconds": 1e4, "size_factor": 0.5})
        for name in range(8):
            run(engine, clock, str(name), list(range(name * 1000, name * 1000 + 8 * PAGE)))
        snapshot = engine.snapshot()
        lost[kv_level] = snapshot.total("pages_released")
        assert (snapshot.value("pages_stepped_down", "int8") > 0) is (kv_level >= 1)
        assert (snapshot.value("pages_stepped_down", "int4") > 0) is (kv_level >= 2)
    assert lost[0] > lost[1] > lost[2] == 0


def test_unprotected_pages_are_stepped_down_before_retained_ones(make_engine, clock):
    engine = make_engine(num_slots=32)
    engine.patch_knobs({"kv_level": 1, "ttl_seconds": 1000.0, "size_factor": 4.5 / 32})
    run(engine, clock, "old", list(range(100, 100 + 5 * PAGE)))
    run(engine, clock, "new", list(range(3 * PAGE)))
    assert idle(engine) == (4, 4)
    assert engine.cache.reclaim(engine.pool.available_slots + 1, clock.now)
    int8 = {state: sum(engine.pool.counts[state][1]) for state in IDLE_STATES}
    assert int8 == {PageState.UNPROTECTED: 3, PageState.RETAINED: 0}, "three pages of int8 take two slots"
    assert idle(engine) == (4, 4), "nothing was released"


def test_for_growth_retained_pages_are_released_before_live_ones_are_stepped_down(make_engine, clock):
    engine = make_engine(num_slots=24)
    engine.patch_knobs({"kv_level": 1, "ttl_seconds": 1e4, "size_factor": 1.0})
    run(engine, clock, "cache", list(range(8 * PAGE)))
    running = engine.add_request("running", list(range(500, 500 + 8 * PAGE)), SamplingParams(max_tokens=64))
    while running.num_sealed < 8:
        engine.step()
    while idle(engine)[0]:
        assert all(page.level == 0 for page in running.pages)
        assert engine.cache.reclaim(engine.pool.available_slots + 1, clock.now, Take.GROWTH)
        engine.check_integrity()
    assert engine.snapshot().value("retained_taken", Take.GROWTH) == 8
    assert engine.cache.reclaim(engine.pool.available_slots + 1, clock.now, Take.GROWTH)
    assert any(page.level == 1 for page in running.pages), "the last resort"


def test_sinks_and_the_last_tokens_of_running_sequences_keep_eight_bits(make_engine, clock):
    engine = make_engine(num_slots=24, tail_tokens=16)
    engine.patch_knobs({"kv_level": 2})
    requests = [
        engine.add_request(
            str(i), list(range(i * 1000, i * 1000 + 5 * PAGE)), SamplingParams(max_tokens=14 * PAGE)
        )
        for i in range(4)
    ]
    deepest = 0
    while engine.has_work():
        engine.step()
        engine.check_integrity()
        clock.now += 0.1
        for running in requests:
            if running.pages:
                sealed = running.pages[: running.num_sealed]
                assert all(page.level <= 1 for page in (*sealed[:1], *sealed[-2:]))
                deepest = max([deepest, *(page.level for page in sealed)])
    assert deepest == 2


def test_lowering_max_batch_drains(make_engine, clock):
    engine = make_engine(num_slots=80, knobs=Knobs(max_batch=6))
    for name in range(8):
        engine.add_request(str(name), [name] * 4, SamplingParams(max_tokens=10 + name))
    engine.step()
    patch = engine.patch_knobs({"max_batch": 2})
    assert patch.results == {"max_batch": "deferred"}
    state = engine.knob_state()
    assert (state.effective.max_batch, state.requested.max_batch, state.deferred) == (6, 2, ("max_batch",))
    finished = 0
    while engine.has_work():
        running_before = len(engine.scheduler.running)
        finished += sum(output.finish_reason is not None for output in engine.step())
        assert len(engine.scheduler.running) <= max(2, running_before)
    assert finished == 8
    assert engine.knob_state().deferred == ()


@pytest.mark.parametrize("count", [3])
def test_shared_pages_are_counted_and_converted_once(make_engine, clock, count):
    engine = make_engine(num_slots=40)
    prompt = list(range(6 * PAGE))
    run(engine, clock, "first", prompt)
    for name in range(count):
        engine.add_request(str(name), [*prompt, 1000 + name], SamplingParams(max_tokens=40))
    engine.step()
    live = engine.pool.num_pages(PageState.LIVE)
    assert live == 6 + count, "six shared pages, one own page each"
    engine.patch_knobs({"kv_level": 1})
    engine.step()
    engine.cache.reclaim(20, clock.now, Take.GROWTH)
    engine.check_integrity()
    assert engine.snapshot().value("pages_stepped_down", "int8") <= 6
    while engine.has_work():
        engine.step()
        engine.check_integrity()
