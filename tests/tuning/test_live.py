"""Simulated and live: equal traffic gives equal observations, vectors and rewards.

The live engine here is the real `Engine`, stepping one token at a time on a clock that moves when the session
sleeps; what it says passes through the exporter's text and the scraper, as over HTTP.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from kvpilot.engine.config import knob_bounds
from kvpilot.engine.engine import Engine
from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.kv.storage import CountingStorage, NoStorage
from kvpilot.engine.step_features import FeatureReader
from kvpilot.env.observation import Observation
from kvpilot.env.simulator.core import SimulatedRunner
from kvpilot.env.simulator.latency import load_profile
from kvpilot.env.tuning.actions import Portfolio, Setting
from kvpilot.env.tuning.environment import KVCacheTuningEnv, LiveKVCacheTuningEnv
from kvpilot.env.tuning.session import LiveSession, SessionError
from kvpilot.exporter.collector import EngineCollector, metrics_source
from kvpilot.exporter.scrape import parse_metrics

PORTFOLIO = Portfolio(
    (
        Setting(name="calm", knobs={"kv_level": 0, "size_factor": 0.0, "ttl_seconds": 0.0, "max_batch": 8}),
        Setting(name="press", knobs={"kv_level": 2, "size_factor": 0.6, "ttl_seconds": 30.0, "max_batch": 4}),
    )
)


class LiveState:
    """As agent.control.client.KnobState, as far as a session reads it."""

    def __init__(self, engine):
        self.requested = engine.knob_state().requested.as_dict()
        self.bounds = knob_bounds(engine.config)


class StepwiseEngine(Engine):
    """The engine as it serves, one step at a time, in the place of the simulated one."""

    def advance(self, next_event):
        return [output.request for output in self.step() if output.finish_reason is not None]


class StubClockEngine:
    """The same traffic against an engine that runs every step by itself. `sleep` lets the time pass."""

    def __init__(self, episode):
        self.patches: list[dict] = []
        self.simulation = self._stepwise(episode)
        self.due = episode.warmup_seconds - episode.interval_seconds
        self.simulation.run(until=self.due)
        self.fails = False

    @staticmethod
    def _stepwise(episode):
        begun = replace(episode, warmup_seconds=episode.interval_seconds).start().simulation
        assert begun.clock.now == 0, "nothing has happened yet"
        profile = load_profile(episode.profile).for_page_size(episode.page_size)
        assert profile.model is not None
        config, storage = episode.engine_config(), CountingStorage(NoStorage(), 3)
        runner = SimulatedRunner(profile, begun.clock, config.ladder)
        engine = StepwiseEngine(
            config,
            profile.model.page_shape(episode.page_size),
            runner,
            storage,
            model_max_len=profile.model.max_len,
            quality_loss=profile.quality_loss,
            clock=begun.clock,
        )
        runner.features = FeatureReader(engine.pool, storage)
        begun.engine = engine
        return begun

    @property
    def engine(self):
        return self.simulation.engine

    def sleep(self, seconds):
        self.due += seconds
        self.simulation.run(until=self.due)

    def scrape(self):
        if self.fails:
            raise KVPilotError("the engine does not answer")
        registry = CollectorRegistry()
        EngineCollector(self.engine.snapshot, model_name="m", info={}, registry=registry)
        return parse_metrics(metrics_source(registry)()[0].decode())

    def knobs(self):
        return LiveState(self.engine)

    def patch(self, knobs, expected_revision=None):
        self.patches.append(dict(knobs))
        return self.engine.patch_knobs(dict(knobs), expected_revision)


@pytest.fixture
def live(episode):
    return StubClockEngine(episode)


def live_env(live, episode, **options):
    return LiveKVCacheTuningEnv(
        lambda: LiveSession(live, sleep=live.sleep),
        actions=PORTFOLIO,
        interval_seconds=episode.interval_seconds,
        slo=episode.slo,
        **options,
    )


def assert_equal(live: Observation, simulated: Observation) -> None:
    """Sums of durations are rounded differently by one step and by many."""
    for name in (f.name for f in fields(Observation)):
        assert getattr(live, name) == pytest.approx(getattr(simulated, name), rel=1e-9), name


def test_equal_traffic_gives_equal_observations(live, episode):
    simulated, running = KVCacheTuningEnv(actions=PORTFOLIO), live_env(live, episode)
    one, one_info = simulated.reset(options={"episode": episode})
    other, other_info = running.reset()
    assert_equal(other_info["observation"], one_info["observation"])
    changed = 0
    for action in (0, 2, 0, 1, 2, 0):
        one, _, _, _, one_info = simulated.step(action)
        other, _, _, _, other_info = running.step(action)
        assert_equal(other_info["observation"], one_info["observation"])
        assert other == pytest.approx(one, rel=1e-6)
        assert other_info["knobs"] == one_info["knobs"]
        for name in ("hits", "slo", "quality", "churn"):
            assert other_info["reward_parts"][name] == pytest.approx(one_info["reward_parts"][name]), name
        assert other_info["reward_parts"]["latency"] == 0, "no reference is known of a live engine"
        changed += one_info["changes"] == 4 == other_info["changes"]
    assert changed == 3
    assert [set(patch) for patch in live.patches] == [
        {"kv_level", "size_factor", "ttl_seconds", "max_batch"}
    ] * 3
    assert one_info["observation"].stepped_down_per_second > 0
    assert live.engine.snapshot().total("requests_finished") > 100


def test_the_live_environment_is_a_gymnasium_environment(live, episode):
    env = live_env(live, episode, max_windows=2)
    observation, _ = env.reset()
    assert env.observation_space.contains(observation)
    observation, _, terminated, truncated, _ = env.step(0)
    assert env.observation_space.contains(observation)
    assert (terminated, truncated) == (False, True)
    assert env.observation_space == KVCacheTuningEnv(actions=PORTFOLIO).observation_space


def test_a_failing_engine_ends_the_episode(live, episode):
    env = live_env(live, episode)
    env.reset()
    live.fails = True
    observation, reward, terminated, truncated, info = env.step(2)
    assert (reward, terminated, truncated) == (-1.0, True, False)
    assert info["error"] == "the engine does not answer"
    assert np.isfinite(observation).all()


def test_a_restart_is_seen(live, episode):
    session = LiveSession(live, sleep=live.sleep)
    session.advance(10.0)
    fresh = StubClockEngine(replace(episode, warmup_seconds=10.0))
    live.scrape = fresh.scrape
    with pytest.raises(SessionError, match="restarted"):
        session.advance(10.0)
