"""The whole loop against an engine in memory: whatever is observed and wished, what is written keeps the limits."""

import json
import math

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvpilot.agent.control.client import EngineUnavailableError, KnobState, PatchResult, UnauthorizedError
from kvpilot.agent.control.controller import Controller
from kvpilot.agent.control.nouns import Control, Mode
from kvpilot.agent.guard import GuardLimits, SloLimits, default_steps, intervals
from kvpilot.engine.config import EngineConfig, Knobs, knob_bounds, validate_knobs
from kvpilot.engine.errors import KnobStaleError
from kvpilot.engine.stats import StatsSnapshot
from kvpilot.env.observation import REQUIRED
from kvpilot.env.policy import Proposal

CONFIG = EngineConfig()
BOUNDS = knob_bounds(CONFIG)
MIN_INTERVAL = 5.0


class MemoryEngine:
    """Its clock is the test's; `fault` happens once."""

    def __init__(self) -> None:
        self.now, self.revision, self.knobs_now = 0.0, 1, Knobs().as_dict()
        self.gauges: dict = {}
        self.fault = ""
        self.writes: list[tuple[float, dict, dict]] = []  # time, knobs before, changes

    def scrape(self) -> StatsSnapshot:
        if self.fault == "dead":
            raise EngineUnavailableError("dead")
        counters = {("steps", ()): -self.now if self.fault == "reset" else self.now}
        counters["generation_tokens", ()] = counters["steps", ()]
        return StatsSnapshot(time=self.now, values={**counters, **self.gauges}, histograms={})

    def knobs(self) -> KnobState:
        if self.fault == "token":
            raise UnauthorizedError("token")
        values = dict(self.knobs_now)
        return KnobState(
            revision=self.revision,
            effective=values,
            requested=values,
            bounds=BOUNDS,
            classes=dict.fromkeys(BOUNDS, "hot"),
        )

    def patch(self, knobs, expected_revision=None) -> PatchResult:
        if self.fault == "race":
            self.revision += 1
        assert expected_revision is not None
        if expected_revision != self.revision:
            raise KnobStaleError(expected_revision, self.revision)
        clean = validate_knobs(dict(knobs), CONFIG)
        self.writes.append((self.now, dict(self.knobs_now), clean))
        self.knobs_now.update(clean)
        self.revision += 1
        if self.fault == "lost answer":
            raise EngineUnavailableError("lost answer")
        return PatchResult(revision=self.revision, results=dict.fromkeys(clean, "applied"))


class Scripted:
    name = "scripted"
    wish: dict

    def reset(self) -> None:
        pass

    def propose(self, observation, knobs, bounds) -> Proposal:
        assert all(math.isfinite(getattr(observation, name)) for name in REQUIRED)
        return Proposal(self.wish, "a test")


class Memo:
    """An audit log in memory; JSON as strict as the real one."""

    def __init__(self) -> None:
        self.lines: list[dict] = []

    def write(self, record: dict) -> None:
        self.lines.append(json.loads(json.dumps(record, allow_nan=False, default=str)))


def make_controller(engine: MemoryEngine, policy: Scripted, audit: Memo) -> Controller:
    limits = GuardLimits(min_interval_seconds=intervals(MIN_INTERVAL), min_windows=1)
    return Controller(
        engine=engine,
        policy=policy,
        audit=audit,  # pyright: ignore[reportArgumentType]
        mode=Mode.AUTO,
        limits=limits,
        window_seconds=1e-3,
        clock=lambda: engine.now,
        unix_clock=lambda: engine.now,
    )


GAUGE_NAMES = ("requests_running", "requests_waiting", "waiting_mean_seconds", "waiting_oldest_seconds")
ALL_WELL = {(name, ()): 1.0 for name in (*GAUGE_NAMES, "pool_bytes")}
GAUGES = st.fixed_dictionaries(
    {(name, ()): st.sampled_from([0.0, 0.0, 1.0, 50.0, math.nan, math.inf, -1.0]) for name in GAUGE_NAMES},
    optional={("pool_bytes", ()): st.sampled_from([100.0, 0.0, math.nan])},
)
VALUES = st.sampled_from(
    [-1e9, -1, 0, 0.3, 1, 2, 7.5, 64, 300.0, 1e9, 10**400, math.nan, math.inf, "2", None, True]
)
WISHES = st.dictionaries(st.sampled_from([*BOUNDS, "page_size"]), VALUES)
FAULTS = st.sampled_from(["", "", "", "", "dead", "token", "reset", "race", "lost answer"])
ROUNDS = st.lists(st.tuples(st.floats(0.5, 8.0), st.just(ALL_WELL) | GAUGES, WISHES, FAULTS), max_size=25)


def play(controller: Controller, engine: MemoryEngine, policy: Scripted, rounds) -> None:
    for pause, gauges, wish, fault in rounds:
        engine.now += pause
        engine.gauges, policy.wish, engine.fault = gauges, wish, fault
        controller.tick()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(ROUNDS)
def test_whatever_happens_what_is_written_keeps_bounds_step_and_interval(rounds):
    engine, policy, audit = MemoryEngine(), Scripted(), Memo()
    play(make_controller(engine, policy, audit), engine, policy, rounds)
    last: dict[str, float] = {}
    for now, before, changes in engine.writes:
        for name, value in changes.items():
            assert BOUNDS[name].low <= value <= BOUNDS[name].high
            assert value == default_steps()[name].limit(before[name], value)
            assert now - last.get(name, -math.inf) >= MIN_INTERVAL
            last[name] = now
    intents = [line for line in audit.lines if line["kind"] == "intent"]
    assert len(intents) >= len(engine.writes)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(ROUNDS)
def test_with_an_slo_too_each_write_is_a_shrunk_wish_or_a_way_back(rounds):
    """Whatever is observed, wished and broken: bounds and step hold for every write, and a write that is not the
    policy's only undoes one that was, towards knobs that had been in force."""
    engine, policy, audit = MemoryEngine(), Scripted(), Memo()
    controller = make_controller(engine, policy, audit)
    controller.limits = GuardLimits(
        min_interval_seconds=intervals(MIN_INTERVAL),
        min_windows=1,
        slo=SloLimits(ttft_p99_seconds=2.0),
        settle_seconds=4.0,
        max_reverts_per_hour=1,
        freeze_seconds=10.0,
    )
    play(controller, engine, policy, rounds)
    in_force = {name: {value} for name, value in Knobs().as_dict().items()}
    last: dict[str, float] = {}
    intents = {line["time"]: line for line in audit.lines if line["kind"] == "intent"}
    for now, before, changes in engine.writes:
        line = intents[round(now, 3)]
        for name, value in changes.items():
            assert BOUNDS[name].low <= value <= BOUNDS[name].high
            assert value == default_steps()[name].limit(before[name], value)
            if line["step_back"]:
                low, high = min(in_force[name]), max(in_force[name])
                assert low <= value <= high
            else:
                assert name in line["wanted"]
                assert now - last.get(name, -math.inf) >= MIN_INTERVAL
            last[name] = now
            in_force[name].add(value)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=30)
@given(
    ROUNDS, st.sampled_from([Control(), Control(mode=Mode.CANARY), Control(mode=Mode.AUTO, killed="a file")])
)
def test_where_the_loop_may_not_act_nothing_is_ever_written(rounds, control):
    engine, policy, audit = MemoryEngine(), Scripted(), Memo()
    controller = make_controller(engine, policy, audit)
    controller.control = lambda: control
    play(controller, engine, policy, rounds)
    assert engine.writes == []


def test_the_scripted_loop_does_write_when_all_is_well():
    engine, policy, audit = MemoryEngine(), Scripted(), Memo()
    engine.gauges = ALL_WELL
    policy.wish = {"kv_level": 2}
    controller = make_controller(engine, policy, audit)
    for _ in range(4):
        engine.now += MIN_INTERVAL
        controller.tick()
    assert [changes for _, _, changes in engine.writes] == [{"kv_level": 1}, {"kv_level": 2}]
