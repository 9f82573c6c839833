"""One trial of acting pods against the others: its clock, its window, and what ends it."""

import pytest

from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.stats import StatsRecorder
from kvpilot.k8s.canary import Reason, Trial
from kvpilot.k8s.gates import Gate
from kvpilot.k8s.policy_resource import CanarySettings
from kvpilot.k8s.workload import Pod

TTFT = "time_to_first_token_seconds"
SETTINGS = CanarySettings(
    warmup_seconds=10,
    observe_seconds=100,
    timeout_seconds=300,
    gates=(Gate(metric=TTFT, statistic="p99", min_samples=50),),
)


class Pods:
    """Engines whose counters rise with every look."""

    def __init__(self) -> None:
        self.latency = {"canary": 0.1, "one": 0.1, "two": 0.1}
        self.silent: set[str] = set()
        self.looks = 0
        self._recorders = {name: StatsRecorder() for name in self.latency}
        self._time = 0.0

    def restart(self, name: str) -> None:
        self._recorders[name] = StatsRecorder()

    def fetch(self, url: str):
        if url in self.silent:
            raise KVPilotError("does not answer")
        self.looks += 1
        self._time += 1
        recorder = self._recorders[url]
        recorder.observe(TTFT, self.latency[url], 100)
        recorder.add("requests_received", 100)
        return recorder.snapshot(self._time, {})


@pytest.fixture
def pods() -> Pods:
    return Pods()


def new_trial() -> Trial:
    canary, *baseline = (Pod(name, name, 0, "", name) for name in ("canary", "one", "two"))
    return Trial(SETTINGS, [canary], baseline, now=0.0)


def run(trial: Trial, pods: Pods, *times: float):
    return [trial.advance(time, pods.fetch) for time in times][-1]


def test_nothing_is_looked_at_but_the_two_ends_of_the_window(pods):
    trial = new_trial()
    assert run(trial, pods, 0, 9).reason is Reason.WARMING_UP
    assert pods.looks == 0
    assert run(trial, pods, 10, 50, 109).reason is Reason.OBSERVING
    assert pods.looks == 3
    state = run(trial, pods, 110)
    assert (state.reason, state.passed) == (Reason.GATES_PASSED, True)
    assert pods.looks == 6


def test_a_longer_tail_fails(pods):
    pods.latency["canary"] = 0.5
    assert run(new_trial(), pods, 10, 110).passed is False


def test_a_verdict_stays(pods):
    trial = new_trial()
    assert run(trial, pods, 10, 110).passed
    pods.latency["canary"] = 9.0
    assert run(trial, pods, 200, 1000).passed


def test_a_baseline_pod_that_does_not_answer_at_the_end_keeps_it_open(pods):
    trial = new_trial()
    run(trial, pods, 10)
    pods.silent.add("one")
    state = run(trial, pods, 110)
    assert (state.passed, state.reason) == (None, Reason.MISSING_SAMPLES)
    assert "one: does not answer" in state.message
    pods.silent.clear()
    assert run(trial, pods, 120).passed


@pytest.mark.parametrize("silent", ["canary", "two"])
def test_whoever_never_answers_the_time_runs_out_and_it_fails(pods, silent):
    pods.silent.add(silent)
    trial = new_trial()
    assert run(trial, pods, 10, 110, 299).passed is None
    state = run(trial, pods, 300)
    assert (state.passed, state.reason) == (False, Reason.TIMED_OUT)
    pods.silent.clear()
    assert run(trial, pods, 400).passed is False


def test_a_restarted_engine_begins_the_window_anew(pods):
    trial = new_trial()
    pods.fetch("two")
    run(trial, pods, 10)
    pods.restart("two")
    state = run(trial, pods, 110)
    assert (state.passed, state.message) == (None, "restarted: two; once more")
    assert run(trial, pods, 111, 209).reason is Reason.OBSERVING
    assert run(trial, pods, 210).passed
