"""Whatever arrives and whatever the knobs do: every request ends, and the books balance after every step."""

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpilot.engine.config import Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.kv.eviction import POLICIES
from kvpilot.engine.request import FinishReason, SamplingParams
from kvpilot.engine.scheduler import FORCED_EVERY

MAX_ADMISSIONS_PER_STEP = 8  # the ceiling of max_batch below

knob_changes = st.fixed_dictionaries(
    {},
    optional={
        "ttl_seconds": st.sampled_from([0.0, 1.0, 20.0, 86400.0]),
        "size_factor": st.sampled_from([0.0, 0.3, 0.7, 1.0]),
        "max_batch": st.integers(1, 8),
        "kv_level": st.integers(0, 2),
    },
)
arrivals = st.tuples(
    st.integers(0, 30),  # steps until it arrives
    st.integers(0, 3),  # conversation
    st.integers(1, 120),  # prompt tokens
    st.integers(1, 60),  # output tokens
)
schedules = st.lists(st.tuples(st.integers(0, 60), knob_changes), max_size=6)


@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    arrivals=st.lists(arrivals, min_size=1, max_size=25),
    schedule=schedules,
    num_slots=st.sampled_from([26, 40, 80]),
    eviction=st.sampled_from(sorted(POLICIES)),
    starvation=st.sampled_from([0.0, 5.0, 300.0]),
)
def test_every_request_ends(make_engine, clock, arrivals, schedule, num_slots, eviction, starvation):
    clock.now = 0.0
    engine: Engine = make_engine(
        num_slots,
        max_batch_ceiling=MAX_ADMISSIONS_PER_STEP,
        knobs=Knobs(max_batch=4),
        eviction=eviction,
        starvation_seconds=starvation,
    )

    schedule_step = engine.scheduler.schedule

    def checked_schedule(now: float):
        preemptions_before = engine.snapshot().value("preemptions")
        batch = schedule_step(now)
        engine.check_integrity()
        if engine.snapshot().value("preemptions") == preemptions_before:
            _check_nobody_waits_in_vain(engine, starvation)
        return batch

    engine.scheduler.schedule = checked_schedule
    pending = sorted(arrivals)
    changes = sorted(schedule, key=lambda change: change[0])
    ended: dict[str, FinishReason] = {}
    accepted: dict[str, int] = {}
    step = 0
    while pending or engine.has_work():
        while pending and pending[0][0] <= step:
            _, session, num_prompt, num_output = pending.pop(0)
            prompt = [session * 1000 + i for i in range(min(num_prompt, engine.max_model_len - 1))]
            name = f"r{len(accepted)}"
            engine.add_request(name, prompt, SamplingParams(max_tokens=num_output))
            accepted[name] = min(num_output, engine.max_model_len - len(prompt))
        while changes and changes[0][0] <= step:
            engine.patch_knobs(changes.pop(0)[1])
        oldest_running = engine.scheduler.running[0] if engine.scheduler.running else None
        before = oldest_running.num_computed if oldest_running else 0
        for output in engine.step():
            if output.finish_reason:
                ended[output.request.request_id] = output.finish_reason
                assert output.request.num_output_tokens == accepted[output.request.request_id]
        if oldest_running is not None:
            assert oldest_running.num_computed > before or oldest_running.is_prefilling, (
                "the oldest stands still"
            )
        engine.check_integrity()
        clock.now += 0.25
        step += 1
        assert step < 20_000, "no progress"
    assert ended == dict.fromkeys(accepted, FinishReason.LENGTH)
    assert engine.snapshot().value("requests_finished", "length") == len(accepted)


def _check_nobody_waits_in_vain(engine: Engine, starvation: float) -> None:
    """When a step runs: with a free seat, an overdue request waits only for memory that running requests hold,
    or for its turn under the rule of one forced admission in eight."""
    scheduler, cache = engine.scheduler, engine.cache
    if not scheduler.waiting or len(scheduler.running) >= scheduler.knobs.max_batch:
        return
    oldest = scheduler.waiting[0]
    if engine.clock() - oldest.arrival_time <= starvation:
        return
    pages = cache.match(oldest.block_hash, (oldest.num_tokens - 1) // engine.config.page_size)
    need = -(-oldest.num_tokens // engine.config.page_size) - len(pages) + scheduler.reserve_slots
    assert cache.obtainable_slots(pages, with_retained=False) < need
    if scheduler.num_since_forced >= FORCED_EVERY - 1 + MAX_ADMISSIONS_PER_STEP:
        assert cache.obtainable_slots(pages, with_retained=True) < need
