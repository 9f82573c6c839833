import json
import logging
import threading
import time
from pathlib import Path

import pytest

from kvpilot.agent.control.audit import AuditLog
from kvpilot.agent.control.client import EngineClient
from kvpilot.agent.control.controller import Controller, Mode, Outcome
from kvpilot.agent.guard import GuardLimits, Reason, intervals
from kvpilot.agent.policies.threshold import ThresholdPolicy
from kvpilot.engine.stats import StatsRecorder
from kvpilot.env.policy import Proposal


class Wish:
    """A policy that always wants the same."""

    name = "wish"

    def __init__(self, **knobs) -> None:
        self.knobs = knobs

    def reset(self) -> None:
        pass

    def propose(self, observation, knobs, bounds) -> Proposal:
        return Proposal(self.knobs, "because")


@pytest.fixture
def make(engine, token, tmp_path):
    clients = []

    def make(policy=None, mode=Mode.AUTO, token=token, audit=tmp_path / "audit.jsonl", warm=True, **kwargs):
        client = EngineClient(url=engine.url, admin_url=engine.url, token=token, timeout_seconds=0.5)
        clients.append(client)
        limits = GuardLimits(
            min_interval_seconds=intervals(0.0), min_windows=1, max_age_seconds=0.4, freeze_seconds=0.0
        )
        controller = Controller(
            engine=client,
            policy=policy or ThresholdPolicy(),
            audit=AuditLog(audit),
            mode=mode,
            limits=limits,
            window_seconds=1e-3,  # since the tick before
            **kwargs,
        )
        if warm:
            assert reasons(controller.tick()) == {Reason.WARMUP}
        return controller

    yield make
    for client in clients:
        client.close()


def reasons(decision) -> set[Reason]:
    return {refusal.reason for refusal in decision.refusals}


def audit_lines(tmp_path) -> list[dict]:
    return [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]


def test_pressure_is_answered_step_by_step_and_read_back(make, engine):
    controller = make()
    engine.press()
    decision = controller.tick()
    assert decision.outcome is Outcome.APPLIED
    assert engine.effective == {"ttl_seconds": 20.0, "size_factor": 0.4, "max_batch": 16, "kv_level": 1}
    assert decision.revision == engine.revision == 2
    controller.tick()
    assert engine.effective == {"ttl_seconds": 20.0, "size_factor": 0.6, "max_batch": 16, "kv_level": 2}
    assert controller.tick().outcome is Outcome.KEPT
    assert len(engine.patches) == 2


def test_advisory_is_the_default_and_writes_nothing(engine, token, tmp_path):
    client = EngineClient(url=engine.url, admin_url=engine.url, token=token)
    limits = GuardLimits(min_windows=1)
    controller = Controller(
        engine=client,
        policy=Wish(kv_level=1),
        audit=AuditLog(tmp_path / "audit.jsonl"),
        limits=limits,
        window_seconds=1e-3,
    )
    controller.tick()
    decision = controller.tick()
    assert decision.outcome is Outcome.ADVISED
    assert decision.changes == {"kv_level": 1}
    assert engine.patches == []
    assert audit_lines(tmp_path)[-1]["changes"] == {"kv_level": 1}
    client.close()


def test_off_observes_only(make, engine, tmp_path):
    controller = make(Wish(kv_level=1), mode=Mode.OFF, warm=False)
    decisions = [controller.tick() for _ in range(3)]
    assert {decision.outcome for decision in decisions} == {Outcome.OBSERVED}
    assert engine.patches == []
    (line,) = map(json.loads, (tmp_path / "audit.jsonl").read_text().splitlines())
    assert (line["kind"], line["mode"], line["acts"]) == ("control", "off", False)


def test_a_deferred_change_is_pending_until_it_is_effective(make, engine):
    told = []
    controller = make(Wish(max_batch=8), listener=lambda decision, *_: told.append(decision))
    engine.defer = {"max_batch"}
    assert controller.tick().outcome is Outcome.PENDING
    assert Reason.PENDING not in reasons(controller.tick())  # the wish is what was requested: nothing to do
    controller.set_policy(Wish(max_batch=4))
    assert reasons(controller.tick()) == {Reason.PENDING}
    engine.effective["max_batch"] = 8
    engine.defer = set()
    told.clear()
    controller.tick()
    assert [decision.outcome for decision in told] == [Outcome.EFFECTIVE, Outcome.APPLIED]


def test_someone_else_changed_the_knobs_freezes_one_decision(make, engine):
    controller = make(Wish(kv_level=1))
    engine.patch_knobs({"knobs": {"max_batch": 5}})
    decision = controller.tick()
    assert decision.outcome is Outcome.HELD
    assert reasons(decision) == {Reason.CONFLICT}
    assert len(engine.patches) == 1  # the other's
    assert controller.tick().outcome is Outcome.APPLIED
    assert engine.effective["max_batch"] == 5


def test_a_race_for_the_revision_is_lost_cleanly(make, engine):
    controller = make(Wish(kv_level=1))
    read = engine.get_knobs

    def read_then_raced():
        answer = json.loads(json.dumps(read()))
        engine.revision += 1
        return answer

    engine.get_knobs = read_then_raced
    decision = controller.tick()
    assert decision.outcome is Outcome.HELD
    assert Reason.CONFLICT in reasons(decision)
    assert engine.effective["kv_level"] == 0


def test_a_wrong_token_holds_and_is_said_so(make, engine, caplog):
    controller = make(Wish(kv_level=1), token="wrong", warm=False)
    with caplog.at_level(logging.WARNING, logger="kvpilot.agent"):
        assert reasons(controller.tick()) == {Reason.UNAUTHORIZED}
    assert "refuses the token: check token_file" in caplog.text
    assert engine.patches == []


def test_a_dead_engine_holds_and_recovers(make, engine):
    controller = make(Wish(kv_level=1))
    engine.fail = {"GET": 503}
    assert reasons(controller.tick()) == {Reason.UNREACHABLE}
    controller.tick()
    assert controller.failures == 2
    engine.fail = {}
    assert controller.tick().outcome is Outcome.APPLIED
    assert controller.failures == 0


def test_a_slow_engine_and_garbage_hold(make, engine):
    controller = make(Wish(kv_level=1))
    engine.garbage = True
    assert reasons(controller.tick()) == {Reason.UNREACHABLE}
    engine.garbage = False
    engine.delay_seconds = 1.0
    assert reasons(controller.tick()) == {Reason.UNREACHABLE}
    assert engine.patches == []


def test_an_engine_that_refuses_a_value_is_held(make, engine):
    controller = make(Wish(kv_level=1))
    engine.patch_knobs = lambda body: (
        422,
        {"error": "invalid", "field": "kv_level", "value": 1, "bounds": "0"},
    )
    decision = controller.tick()
    assert decision.outcome is Outcome.FAILED
    assert reasons(decision) == {Reason.INVALID}


def test_a_lost_answer_is_settled_by_the_next_read_back(make, engine):
    controller = make(Wish(kv_level=1))
    engine.fail, engine.apply_then_fail = {"PATCH": 500}, True
    assert controller.tick().outcome is Outcome.FAILED
    engine.fail = {}
    assert controller.tick().outcome is Outcome.KEPT  # its own change: no conflict
    assert engine.effective["kv_level"] == 1


def test_a_restarted_engine_starts_the_warm_up_again(make, engine):
    controller = make(Wish(kv_level=1))
    engine.recorder = StatsRecorder()
    engine.recorder.add("steps", -5)
    assert reasons(controller.tick()) == {Reason.RESET}
    assert controller.tick().outcome is Outcome.APPLIED


def test_metrics_that_stand_still_hold(make, engine):
    controller = make(Wish(kv_level=1), warm=False)
    controller.window_seconds = 0.2
    controller.tick()
    time.sleep(0.2)
    assert controller.tick().outcome is Outcome.APPLIED
    engine.stopped_clock = engine.now()
    controller.tick()
    time.sleep(0.5)
    controller.set_policy(Wish(kv_level=2))
    assert Reason.STALE in reasons(controller.tick())
    assert engine.effective["kv_level"] == 1


def test_no_audit_no_action(make, engine, tmp_path):
    (tmp_path / "folder").mkdir()
    controller = make(Wish(kv_level=1), audit=tmp_path / "folder", warm=False)
    controller.tick()
    decision = controller.tick()
    assert decision.outcome is Outcome.HELD
    assert Reason.AUDIT in reasons(decision)
    assert engine.patches == []


def test_a_full_disk_holds(make, engine):
    controller = make(Wish(kv_level=1))
    controller.audit = AuditLog(Path("/dev/full"))
    decision = controller.tick()
    assert Reason.AUDIT in reasons(decision)
    assert engine.patches == []


def test_the_audit_tells_intent_then_outcome_with_what_constrained_it(make, tmp_path):
    controller = make(Wish(kv_level=2, max_batch="many", fancy=float("nan")))
    controller.tick()
    intent, decision = audit_lines(tmp_path)[-2:]
    assert (intent["kind"], intent["outcome"]) == ("intent", "pending")
    assert (decision["kind"], decision["outcome"]) == ("decision", "applied")
    assert {c["reason"] for c in decision["constraints"]} == {"step", "not-a-number", "unknown-knob"}
    assert decision["window"]["live_share"] == 0.3
    assert decision["revision"] == 2
    assert controller.refused[Reason.STEP] == 1


def test_a_torn_last_line_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "audit.jsonl"
    path.write_text('{"a": 1}\n{"torn')
    AuditLog(path).write({"b": 2})
    assert path.read_text().splitlines() == ['{"a": 1}', '{"torn', '{"b": 2}']


def test_only_every_nth_observation_decides(make, engine):
    controller = make(Wish(kv_level=1), decide_every=3)
    outcomes = [controller.tick().outcome for _ in range(4)]
    assert outcomes == [Outcome.OBSERVED, Outcome.OBSERVED, Outcome.APPLIED, Outcome.OBSERVED]


def test_a_broken_policy_does_not_end_the_loop(make, engine, caplog):
    class Broken(Wish):
        calls = 0

        def propose(self, observation, knobs, bounds):
            Broken.calls += 1
            if Broken.calls >= 2:
                stop.set()
            raise ZeroDivisionError("a bug in the policy")

    stop = threading.Event()
    make(Broken()).run(stop, interval_seconds=0.01)
    assert Broken.calls == 2
    assert "a bug in the policy" in caplog.text
    assert engine.patches == []


def test_stopping_the_loop_leaves_the_knobs(make, engine):
    stop = threading.Event()
    controller = make(Wish(kv_level=1), listener=lambda d, *_: d.outcome is Outcome.APPLIED and stop.set())
    controller.run(stop, interval_seconds=0.01)
    assert engine.effective["kv_level"] == 1
    assert len(engine.patches) == 1


def test_what_lasts_is_logged_once_and_counted(make, engine, caplog, tmp_path):
    controller = make(Wish(kv_level=1))
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="kvpilot.agent"):
        engine.fail["GET"] = 401
        for _ in range(4):
            assert reasons(controller.tick()) == {Reason.UNAUTHORIZED}
        engine.fail.clear()
        assert controller.tick().outcome is Outcome.APPLIED
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(" | ")[0] for line in said] == ["held", "the line before stood for 3 more", "applied"]
    held = [line for line in audit_lines(tmp_path) if line.get("outcome") == "held"]
    assert len(held) == 5  # each of them is in the audit log, with the first, for want of windows
