from hypothesis import given
from hypothesis import strategies as st

from kvpilot.agent.policies.threshold import ThresholdPolicy
from kvpilot.engine.config import EngineConfig, Knobs, knob_bounds
from kvpilot.env.observation import Observation

BOUNDS = knob_bounds(EngineConfig())


def look(*, waiting=0.0, mean=0.0, oldest=0.0, live=0.2, preemptions=0.0, running=4.0) -> Observation:
    return Observation(
        time=0.0,
        seconds=10.0,
        running=running,
        waiting=waiting,
        waiting_mean_seconds=mean,
        waiting_oldest_seconds=oldest,
        live_share=live,
        preemptions=preemptions,
    )


def knobs(**changes) -> dict[str, float | int]:
    return {**Knobs().as_dict(), **changes}


def test_calm_retains_long_at_full_precision():
    wanted = ThresholdPolicy().propose(look(), knobs(kv_level=2), BOUNDS)
    assert wanted.knobs == {"kv_level": 0, "ttl_seconds": 300.0, "size_factor": 0.5}
    assert wanted.reason.startswith("calm")


def test_each_signal_alone_means_pressure():
    signals = (
        look(waiting=1, oldest=3.0),
        look(waiting=5, mean=1.5, oldest=2.0),
        look(live=0.9),
        look(preemptions=1),
    )
    for observation in signals:
        wanted = ThresholdPolicy().propose(observation, knobs(), BOUNDS)
        assert wanted.knobs["kv_level"] == 2
        assert wanted.reason.startswith("pressure")


def test_pressure_ends_after_three_calm_decisions_in_a_row():
    policy = ThresholdPolicy()
    policy.propose(look(waiting=9, oldest=9.0), knobs(), BOUNDS)
    sequence = [look(), look(), look(waiting=1), look(), look(), look()]
    regimes = []
    for observation in sequence:
        policy.propose(observation, knobs(), BOUNDS)
        regimes.append(policy.under_pressure)
    assert regimes == [True, True, True, True, True, False]


def test_the_batch_grows_while_seats_are_short_and_shrinks_after_preemptions():
    policy = ThresholdPolicy()
    full = look(waiting=9, oldest=9.0, running=16)
    assert policy.propose(full, knobs(), BOUNDS).knobs["max_batch"] == 24
    crowded = look(waiting=9, oldest=9.0, running=16, live=0.8)
    assert "max_batch" not in policy.propose(crowded, knobs(), BOUNDS).knobs
    assert policy.propose(look(preemptions=3), knobs(), BOUNDS).knobs["max_batch"] == 12


positive = st.floats(0, 1e6)


@given(st.lists(st.builds(look, waiting=positive, mean=positive, oldest=positive, live=st.floats(0, 1),
                          preemptions=positive, running=positive), max_size=8),
       st.integers(1, 64))  # fmt: skip
def test_wishes_are_always_within_bounds(observations, batch):
    policy = ThresholdPolicy()
    for observation in observations:
        for name, value in policy.propose(observation, knobs(max_batch=batch), BOUNDS).knobs.items():
            assert isinstance(value, int | float)
            assert BOUNDS[name].low <= value <= BOUNDS[name].high
