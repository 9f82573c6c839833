"""Gates compare tails, on enough samples, and never pass what was not measured."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.stats import StatsRecorder, StatsWindow
from kvpilot.k8s.gates import DEFAULT_GATES, Gate, Outcome, evaluate, overall

TTFT = "time_to_first_token_seconds"
P99 = Gate(metric=TTFT, statistic="p99", max_ratio_permille=1100, min_samples=100)


def window(latencies=(), *, rejected: int = 0, requests: int | None = None) -> StatsWindow:
    recorder = StatsRecorder()
    start = recorder.snapshot(0.0, {})
    for latency, times in latencies:
        recorder.observe(TTFT, latency, times)
    recorder.add("requests_received", sum(times for _, times in latencies) if requests is None else requests)
    recorder.add("requests_rejected", rejected)
    return StatsWindow(start=start, end=recorder.snapshot(60.0, {}))


STEADY = window([(0.09, 1000)])
SAME_MEAN_LONG_TAIL = window([(0.04, 950), (1.04, 50)])


def outcome(gate: Gate, canary, baseline) -> Outcome:
    (result,) = evaluate([gate], canary, baseline)
    return result.outcome


def test_equal_sides_pass():
    assert outcome(P99, [STEADY], [STEADY, STEADY]) is Outcome.PASSED


def test_the_tail_decides_not_the_mean():
    means = [each.histogram(TTFT).mean for each in (STEADY, SAME_MEAN_LONG_TAIL)]
    assert means[0] == pytest.approx(means[1])
    assert outcome(P99, [SAME_MEAN_LONG_TAIL], [STEADY]) is Outcome.FAILED
    assert outcome(P99, [STEADY], [SAME_MEAN_LONG_TAIL]) is Outcome.PASSED


@pytest.mark.parametrize(
    ("canary", "baseline"),
    [
        ([], [STEADY]),
        ([STEADY], []),
        ([None], [STEADY]),
        ([STEADY], [STEADY, None]),
        ([window([(0.01, 99)])], [STEADY]),
        ([STEADY], [window([(0.09, 99)])]),
        ([window()], [window()]),
    ],
)
def test_a_missing_sample_never_passes(canary, baseline):
    results = evaluate([P99], canary, baseline)
    assert [result.outcome for result in results] == [Outcome.MISSING]
    assert overall(results) is Outcome.MISSING


def test_pods_of_a_side_are_pooled():
    half = window([(0.09, 50)])
    assert outcome(P99, [half, half], [STEADY]) is Outcome.PASSED
    slow = window([(5.0, 50)])
    assert outcome(P99, [half, slow], [STEADY]) is Outcome.FAILED


def test_beyond_the_last_bucket_nothing_is_known_but_that_it_is_too_long():
    endless = window([(3600.0, 1000)])
    assert outcome(P99, [endless], [STEADY]) is Outcome.FAILED
    assert outcome(P99, [endless], [endless]) is Outcome.MISSING


def test_slack_is_in_thousandths_of_the_unit():
    tight = Gate(metric=TTFT, statistic="p99", max_ratio_permille=1000, slack_milli=0, min_samples=100)
    loose = Gate(metric=TTFT, statistic="p99", max_ratio_permille=1000, slack_milli=60, min_samples=100)
    slower = window([(0.14, 1000)])  # one bucket further
    assert outcome(tight, [slower], [STEADY]) is Outcome.FAILED
    assert outcome(loose, [slower], [STEADY]) is Outcome.PASSED


def test_a_counter_counts_per_request():
    gate = Gate(metric="requests_rejected", statistic="perRequest", max_ratio_permille=1000, slack_milli=10)
    none = window(requests=1000)
    assert outcome(gate, [none], [none]) is Outcome.PASSED
    assert outcome(gate, [window(requests=1000, rejected=10)], [none]) is Outcome.PASSED
    assert outcome(gate, [window(requests=1000, rejected=11)], [none]) is Outcome.FAILED
    assert outcome(gate, [window(requests=199)], [none]) is Outcome.MISSING


def test_one_failed_gate_decides_and_no_gate_passes_nothing():
    missing = Gate(metric="inter_token_seconds", statistic="p99")
    results = evaluate([P99, missing], [SAME_MEAN_LONG_TAIL], [STEADY])
    assert overall(results) is Outcome.FAILED
    assert overall(evaluate([P99, missing], [STEADY], [STEADY])) is Outcome.MISSING
    assert overall(evaluate([], [STEADY], [STEADY])) is Outcome.MISSING


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"metric": "latency", "statistic": "p99"}, "metric='latency'"),
        ({"metric": "requests_running", "statistic": "p99"}, "a histogram or a counter"),
        ({"metric": TTFT, "statistic": "mean"}, "p90 or p95 or p99"),
        ({"metric": TTFT, "statistic": "perRequest"}, "p90 or p95 or p99"),
        ({"metric": "preemptions", "statistic": "p99"}, "perRequest for preemptions"),
        ({"metric": TTFT, "statistic": "p99", "min_samples": 0}, "min_samples=0"),
        ({"metric": TTFT, "statistic": "p99", "max_ratio_permille": 0}, "max_ratio_permille=0"),
        ({"metric": TTFT, "statistic": "p99", "slack_milli": -1}, "slack_milli=-1"),
    ],
)
def test_a_gate_that_cannot_be_is_refused(fields, said):
    with pytest.raises(ConfigError, match=said):
        Gate(**fields)


latencies = st.lists(st.tuples(st.floats(0.001, 5000), st.integers(1, 400)), max_size=6)


@settings(deadline=None)
@given(latencies, latencies)
def test_whatever_was_measured_a_pass_rests_on_enough_of_it_and_within_the_limit(canary, baseline):
    (result,) = evaluate([P99], [window(canary)], [window(baseline)])
    if result.outcome is Outcome.PASSED:
        assert min(result.canary_samples, result.baseline_samples) >= P99.min_samples
        assert math.isfinite(result.canary)
        assert result.canary <= result.baseline * 1.1


@settings(deadline=None)
@given(latencies)
def test_a_canary_equal_to_its_baseline_never_fails(both):
    assert overall(evaluate(DEFAULT_GATES, [window(both)], [window(both)])) is not Outcome.FAILED
