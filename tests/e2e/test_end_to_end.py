"""Engine, Prometheus, sidecar in mode auto and traffic, all real: what must be true after a run of a few minutes."""

import json
from bisect import bisect_right
from collections import Counter

import pytest

from kvpilot.engine.stats import METRICS
from kvpilot.env.observation import observe

pytestmark = [pytest.mark.e2e, pytest.mark.model, pytest.mark.timeout(600)]
SCRAPE_SECONDS = 1.0


def test_every_request_was_answered(world):
    assert world.answered > 50
    assert world.unanswered == 0


def test_the_replay_ran_against_the_engine(world):
    result = json.loads((world.directory / "replay.json").read_text(encoding="utf-8"))
    assert result["provenance"]["errors"] == []
    assert result["provenance"]["has_engine_statistics"]


def test_knobs_changed(world):
    applied = [
        record
        for record in world.records()
        if record["kind"] == "decision" and record["outcome"] == "applied"
    ]
    assert len(applied) >= 2
    changed = {name for record in applied for name in record["changes"]}
    assert {"ttl_seconds", "size_factor"} <= changed
    assert world.prometheus.query("sum(kvpilot_knob_changes_total)")[0]["value"][1] != "0"


def test_they_never_left_their_bounds_nor_jumped(world):
    bounds = world.admin("GET")["bounds"]
    for record in world.records():
        for name, value in record.get("changes", {}).items():
            assert bounds[name]["low"] <= value <= bounds[name]["high"]
        for name, value in record.get("knobs", {}).items():
            assert bounds[name]["low"] <= value <= bounds[name]["high"]


def test_the_guard_refused_what_it_should(world):
    reasons = {
        constraint["reason"] for record in world.records() for constraint in record.get("constraints", ())
    }
    assert "too-few-observations" in reasons  # the first windows
    assert "step" in reasons  # the policy asks for more than one step at once
    assert "someone-else-changed-the-knobs" in reasons
    assert "kill-switch" in reasons


def test_after_the_kill_nothing_was_written(world):
    records = world.records()
    killed = next(i for i, record in enumerate(records) if "kill-switch" in json.dumps(record))
    assert not [record for record in records[killed:] if record.get("outcome") == "applied"]


def test_a_strangers_knob_stands(world):
    """The loop froze instead of fighting."""
    records = world.records()
    stranger = next(
        i for i, record in enumerate(records) if "someone-else-changed-the-knobs" in json.dumps(record)
    )
    assert records[stranger]["outcome"] == "held"
    assert records[stranger]["knobs"]["max_batch"] == world.strangers_batch


def test_the_audit_log_replays_to_the_same_decisions(world):
    done = world.autotune("audit", str(world.audit), "--replay")
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_query_of_every_dashboard_has_data(world):
    empty = [": ".join(key) for key in world.queries if not world.has_data(key)]
    assert len(world.queries) > 60
    assert empty == []


def test_alerts_fired_and_cleared(world):
    assert "firing" in world.seen_alerts["KVPilotQueueBeyondSlo"]
    assert "firing" in world.seen_alerts["KVPilotTtftBeyondSlo"]
    assert "firing" in world.seen_alerts["KVPilotKnobsChangedByOthers"]
    assert set(world.prometheus.alerts()) <= {"KVPilotReverting"}  # which looks back for an hour


def test_prometheus_and_direct_scrapes_give_the_same_window(world):
    """Both ends lie between two direct scrapes, in time and in every counter."""
    times = [snapshot.time for snapshot in world.scrapes]
    for window in world.windows:
        assert not window.is_reset()
        for end in (window.start, window.end):
            index = bisect_right(times, end.time)
            assert 0 < index < len(times), "the direct scrapes cover it"
            before, after = world.scrapes[index - 1], world.scrapes[index]
            assert after.time - before.time < SCRAPE_SECONDS
            for series, value in end.values.items():
                if METRICS[series[0]].kind == "counter":
                    low, high = before.value(series[0], *series[1]), after.value(series[0], *series[1])
                    assert low <= value <= high, series
            for name, histogram in end.histograms.items():
                assert before.histograms[name].total <= histogram.total <= after.histograms[name].total
    seen = observe(world.windows[1])
    assert seen.tokens_per_second is not None
    assert seen.tokens_per_second > 0
    assert seen.hit_rate is not None


def test_the_sidecar_stays_small(world):
    assert world.resident_bytes < 150e6


def test_requests_and_decisions_left_spans(world, wait_until):
    wait_until(lambda: "kill-switch" in str(world.spans), what="the last decisions are sent")
    names = Counter(span.name for span in world.spans)
    assert names["request"] >= world.answered
    assert names["queue"] == names["request"]
    assert min(names["prefill"], names["decode"], names["observation"]) > 0
    decisions = [span for span in world.spans if span.name == "decision"]
    refusals = {a.value.string_value for span in decisions for event in span.events for a in event.attributes}
    assert {"step", "kill-switch"} <= refusals
