"""The sidecar as an operator meets it: restart proposals, deadline, metrics, health, logs, audit, replay."""

import json
import logging
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from kvpilot.agent.control import run as run_module
from kvpilot.agent.control.audit import AuditError, AuditLog, read_audit
from kvpilot.agent.control.client import EngineClient
from kvpilot.agent.control.config import load_settings
from kvpilot.agent.control.controller import Controller
from kvpilot.agent.control.deadline import DeadlinePolicy
from kvpilot.agent.control.loaded_policy import load, load_source
from kvpilot.agent.control.log_format import JsonFormatter
from kvpilot.agent.control.metrics import METRICS, PREFIX, AgentMetrics
from kvpilot.agent.control.nouns import Failure, Mode, Outcome
from kvpilot.agent.control.replay import replay
from kvpilot.agent.control.server import ControlServer, Heartbeat
from kvpilot.agent.control.state import StateFile
from kvpilot.agent.control.targets import OwnTarget, make_target
from kvpilot.agent.guard import GuardLimits, Reason, intervals
from kvpilot.agent.policies.static import StaticPolicy
from kvpilot.engine.errors import ConfigError
from kvpilot.env.observation import Observation
from kvpilot.env.policy import Proposal
from kvpilot.k8s.control_document import ControlDocument, PolicySource

SEEN = Observation(time=0.0, seconds=1.0)


@pytest.fixture
def target(engine, token):
    target = OwnTarget(url=engine.url, admin_url=engine.url, token=token, timeout_seconds=1.0)
    yield target
    target.close()


@pytest.fixture
def make_sidecar(engine, target, tmp_path):
    def make(**changes):
        paths = {"audit": tmp_path / "audit.jsonl", "state": tmp_path / "state.json"}
        settings = {
            "interval_seconds": 0.1,
            "decision_seconds": 0.1,
            "mode": "auto",
            "slo": {"ttft_p99_seconds": None},
            **paths,
            **changes,
        }
        settings = load_settings(settings)
        source = target.source(settings)
        sidecar = run_module.Sidecar(settings, loaded=load(settings.policy), target=target, source=source)
        sidecar.controller.window_seconds = 1e-3  # since the tick before
        return sidecar

    return make


def ticks(sidecar, count: int) -> list:
    """A control document brings its own pace: a test's is faster."""
    decisions = []
    for _ in range(count):
        sidecar.controller.window_seconds = 1e-3
        decisions.append(sidecar.controller.tick())
    return decisions


def lines(tmp_path) -> list[dict]:
    return [line.record for line in read_audit(tmp_path / "audit.jsonl")]


def test_a_decision_log_replays_and_a_changed_one_does_not(make_sidecar, engine, tmp_path):
    sidecar = make_sidecar()
    engine.press()
    ticks(sidecar, 6)
    assert engine.effective["kv_level"] == 1
    report = replay(read_audit(tmp_path / "audit.jsonl"))
    assert report.decisions == 6
    assert report.differences == []
    tampered = (
        (tmp_path / "audit.jsonl")
        .read_text()
        .replace('"waiting_oldest_seconds": 10.0', '"waiting_oldest_seconds": 0.1')
    )
    (tmp_path / "audit.jsonl").write_text(tampered)
    assert replay(read_audit(tmp_path / "audit.jsonl")).differences


def test_a_replay_refuses_another_policy_than_the_logs(make_sidecar, engine, tmp_path):
    knobs = tmp_path / "knobs.json"
    knobs.write_text('{"kv_level": 1}')
    ticks(make_sidecar(policy=f"static:{knobs}"), 5)
    assert replay(read_audit(tmp_path / "audit.jsonl")).differences == []
    knobs.write_text('{"kv_level": 2}')
    with pytest.raises(ConfigError, match="hash"):
        replay(read_audit(tmp_path / "audit.jsonl"))


def test_a_replay_needs_the_logs_beginning(make_sidecar, engine, tmp_path):
    ticks(make_sidecar(), 4)
    path = tmp_path / "audit.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    with pytest.raises(ConfigError, match="beginning is missing"):
        replay(read_audit(path))


def test_a_log_without_decisions_is_said_so(tmp_path):
    (tmp_path / "a").write_text("not json\n")
    with pytest.raises(AuditError, match="holds no decision"):
        list(read_audit(tmp_path / "a"))
    with pytest.raises(AuditError, match="cannot be read"):
        list(read_audit(tmp_path / "b"))


def test_the_control_document_changes_policy_and_mode_of_a_running_loop(make_sidecar, engine, tmp_path):
    path = tmp_path / "control.yaml"
    path.write_text(ControlDocument(revision=1, mode="advisory").to_yaml())
    sidecar = make_sidecar(control_file=path)
    engine.press()
    ticks(sidecar, 1)  # reads the document, and waits for a window of its length
    assert ticks(sidecar, 4)[-1].outcome is Outcome.ADVISED
    path.write_text(ControlDocument(revision=2, mode="auto", policy=PolicySource(name="default")).to_yaml())
    sidecar.controller.tick()
    assert sidecar.loaded.spec == "default"
    assert [line["kind"] for line in lines(tmp_path)[-3:-1]] == ["setup", "control"]
    path.write_text(ControlDocument(revision=3, mode="auto", policy=PolicySource(name="magic")).to_yaml())
    held = ticks(sidecar, 2)[-1]
    assert {refusal.reason for refusal in held.refusals} >= {Reason.HOLD}
    assert "magic" in str(held)


def test_a_document_without_a_policy_keeps_the_one_that_was_asked_for(make_sidecar, tmp_path):
    path = tmp_path / "control.yaml"
    path.write_text("revision: 1\nmode: advisory\n")
    sidecar = make_sidecar(control_file=path, policy="ppo", decision_seconds=None)
    ticks(sidecar, 1)
    assert sidecar.loaded.spec == "ppo"
    assert sidecar.controller.window_seconds == 120.0  # what it was trained on
    path.write_text("revision: 2\npolicy: {name: default}\n")
    ticks(sidecar, 1)
    assert (sidecar.loaded.spec, sidecar.controller.window_seconds) == ("default", 60.0)


def test_a_trained_policy_at_another_pace_is_refused():
    with pytest.raises(ConfigError, match="decision_seconds=60 is invalid for policy 'ppo': expected 120"):
        load("ppo", decision_seconds=60.0)


def test_a_latch_that_cannot_be_written_still_counts_and_nothing_new_is_tried(make_sidecar, engine, tmp_path):
    (tmp_path / "where").mkdir()
    sidecar = make_sidecar(state=tmp_path / "where" / "state.json")
    engine.press()
    ticks(sidecar, 2)
    (tmp_path / "where" / "state.json").unlink()
    (tmp_path / "where").rmdir()
    sidecar.controller.memory = replace(sidecar.controller.memory, reverts=(time.time(),))
    sidecar.controller._latch.keep(sidecar.controller.memory)
    held = ticks(sidecar, 3)[-1]
    assert Reason.SAFE_MODE in {refusal.reason for refusal in held.refusals}
    assert engine.patches == []
    (tmp_path / "where").mkdir()
    assert ticks(sidecar, 1)[-1].outcome is Outcome.APPLIED
    assert StateFile(tmp_path / "where" / "state.json").read().reverts


def test_a_policy_file_must_be_the_one_that_the_document_means(tmp_path):
    path = tmp_path / "policy.json"
    path.write_text("{}")
    with pytest.raises(ConfigError, match="has SHA-256"):
        load_source(PolicySource(file=str(path), sha256="0" * 64), decision_seconds=60.0)


def test_a_knob_that_needs_a_restart_becomes_a_proposal_and_never_a_write(engine, token, tmp_path):
    answer = engine.get_knobs

    def cold():
        status, body = answer()
        return status, {**body, "classes": {**body["classes"], "max_batch": "restart"}}

    engine.get_knobs = cold
    client = EngineClient(url=engine.url, admin_url=engine.url, token=token)
    controller = Controller(
        engine=client,
        policy=StaticPolicy({"max_batch": 999, "kv_level": 1}),
        audit=AuditLog(tmp_path / "audit.jsonl"),
        mode=Mode.AUTO,
        limits=GuardLimits(min_interval_seconds=intervals(0.0), min_windows=1),
        window_seconds=1e-3,
        how_to_restart=lambda knob, value: f"--{knob} {value:g}",
    )
    controller.tick()
    decision = controller.tick()
    client.close()
    assert decision.changes == {"kv_level": 1}
    assert [str(one) for one in decision.proposals] == ["max_batch=64 needs a restart: --max_batch 64"]
    assert lines(tmp_path)[-1]["proposals"][0]["knob"] == "max_batch"


def test_a_policy_that_hangs_fails_at_its_deadline_and_its_late_answer_is_dropped():
    release = threading.Event()

    class Slow:
        name = "slow"

        def reset(self) -> None:
            pass

        def propose(self, observation, knobs, bounds) -> Proposal:
            release.wait(10)
            return Proposal({"kv_level": 2}, "late")

    policy = DeadlinePolicy(Slow(), deadline_seconds=0.02)
    first, second = (policy.propose(SEEN, {}, {}) for _ in range(2))
    assert isinstance(first, Failure)
    assert isinstance(second, Failure)
    assert first.refusal.reason is second.refusal.reason is Reason.DEADLINE
    assert "earlier call" in second.refusal.detail
    release.set()
    policy.deadline_seconds = 10.0
    while isinstance(answer := policy.propose(SEEN, {}, {}), Failure):
        assert "earlier call" in answer.refusal.detail
    assert answer.knobs == {"kv_level": 2}


@pytest.mark.parametrize("answer", [None, {"kv_level": 1}, (1, 2), ({1: 2}, "why"), "hold"])
def test_a_policy_that_answers_nonsense_fails(answer):
    class Nonsense:
        name = "nonsense"

        def reset(self) -> None:
            pass

        def propose(self, observation, knobs, bounds) -> Any:
            return answer

    failed = DeadlinePolicy(Nonsense(), deadline_seconds=5.0).propose(SEEN, {}, {})
    assert isinstance(failed, Failure)
    assert failed.refusal.reason is Reason.POLICY


class Learned:
    """What a learned policy says of its training."""

    name = "learned"

    def reset(self) -> None:
        pass

    def propose(self, observation, knobs, bounds) -> Proposal:
        return Proposal({"kv_level": 2}, "learned")

    def envelope_distance(self, observation) -> float:
        return 0.4

    def is_outside_envelope(self, observation) -> bool:
        return True


def test_outside_the_training_envelope_it_holds_or_the_threshold_policy_decides(make_sidecar, engine):
    engine.press()
    for outside, outcome in (("hold", Outcome.HELD), ("threshold", Outcome.APPLIED)):
        sidecar = make_sidecar(outside=outside)
        sidecar.controller.set_policy(Learned())
        decision = ticks(sidecar, 4)[-1]
        assert decision.outcome is outcome
        assert Reason.OUTSIDE in {refusal.reason for refusal in decision.refusals}
    assert engine.effective["kv_level"] == 1


def test_every_metric_that_is_named_is_there_and_no_other(make_sidecar, engine):
    sidecar = make_sidecar()
    engine.press()
    ticks(sidecar, 5)
    host, port = "127.0.0.1", 0
    with ControlServer(host, port, sidecar.registry, sidecar.heartbeat) as server:
        url = "http://{}:{}".format(*server.address)
        text = httpx.get(f"{url}/metrics", trust_env=False).text
        assert httpx.get(f"{url}/healthz", trust_env=False).json()["ok"]
        assert httpx.get(f"{url}/admin", trust_env=False).status_code == 404
    families = {family.name: family for family in text_string_to_metric_families(text)}
    created = {name for name in families if name.endswith("_created")}
    assert set(families) - created == {PREFIX + name for name in METRICS}
    applied = {s.labels["name"]: s.value for s in families[f"{PREFIX}applied_knob"].samples}
    assert applied["kv_level"] == engine.effective["kv_level"]
    modes = {s.labels["mode"]: s.value for s in families[f"{PREFIX}mode"].samples}
    assert modes == {"off": 0, "advisory": 0, "canary": 0, "auto": 1}
    (info,) = families[f"{PREFIX}policy_info"].samples
    assert info.labels == {"name": "threshold", "hash": sidecar.loaded.digest[:12]}


def test_a_loop_that_no_longer_turns_is_unhealthy():
    now = 0.0
    heartbeat = Heartbeat(10.0, clock=lambda: now)
    now = 11.0
    with ControlServer("127.0.0.1", 0, CollectorRegistry(), heartbeat) as server:
        url = "http://{}:{}/healthz".format(*server.address)
        assert httpx.get(url, trust_env=False).status_code == 503
        heartbeat.beat()
        assert httpx.get(url, trust_env=False).status_code == 200
        with pytest.raises(ConfigError, match="choose another port"):
            ControlServer(*server.address, CollectorRegistry(), heartbeat)


def test_where_nothing_is_counted_there_is_health_alone():
    with ControlServer("127.0.0.1", 0, None, Heartbeat(10.0), setting="health_port") as server:
        url = "http://{}:{}".format(*server.address)
        assert httpx.get(f"{url}/healthz", trust_env=False).json()["ok"]
        assert httpx.get(f"{url}/metrics", trust_env=False).status_code == 404
        with pytest.raises(ConfigError, match="health_port='127"):
            ControlServer(*server.address, None, Heartbeat(10.0), setting="health_port")


def test_any_wish_can_be_shown_as_a_metric():
    metrics = AgentMetrics(CollectorRegistry(), GuardLimits())
    metrics.set_counterfactual("recorded", {"hit_rate": None, "objective": 0.5}, {"hit_rate": 0.1})


def test_json_logs_carry_the_decision(make_sidecar, engine, caplog):
    engine.press()
    with caplog.at_level(logging.INFO, logger="kvpilot.agent"):
        ticks(make_sidecar(), 4)
    shown = [json.loads(JsonFormatter().format(record)) for record in caplog.records]
    applied = [line for line in shown if line.get("decision", {}).get("outcome") == "applied"]
    assert applied[0]["decision"]["changes"]["kv_level"] == 1
    assert applied[0]["level"] == "info"


def test_another_engine_must_be_found_and_told_how_it_was_started(engine):
    with pytest.raises(ConfigError, match="started_with"):
        make_target(load_settings({"target": "vllm", "url": engine.url}))
    started = {"max_batch": 256, "kv_level": 0}
    with pytest.raises(ConfigError, match="no vllm server"):
        make_target(load_settings({"target": "vllm", "url": engine.url, "started_with": started}))


VLLM_METRICS = Path(__file__).parents[1] / "exporter" / "data" / "vllm_0.33.txt"


@pytest.fixture
def vllm():
    """A server that answers as vLLM does, with what it exports, under traffic; it lists what is written to it."""
    text, written, scrapes = VLLM_METRICS.read_text(), [], []

    def grown(line: str) -> str:
        """All counters and histograms have counted on since the last scrape."""
        name, space, value = line.rpartition(" ")
        moves = any(part in name for part in ("_total", "_bucket", "_count", "_sum"))
        return f"{name}{space}{float(value) * len(scrapes)}" if moves and not line.startswith("#") else line

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            scrapes.append(self.path)
            body, kind = '{"version": "0.33.1"}', "application/json"
            if self.path == "/metrics":
                body, kind = "\n".join(map(grown, text.splitlines())) + "\n", "text/plain"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_PATCH(self) -> None:
            written.append(self.path)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield SimpleNamespace(url=f"http://127.0.0.1:{server.server_address[1]}", written=written)
    server.shutdown()
    server.server_close()


def test_vllm_is_watched_and_what_it_does_not_take_live_is_proposed_with_the_flag(vllm, tmp_path):
    started = {"max_batch": 256, "kv_level": 0}
    settings = load_settings({"target": "vllm", "url": vllm.url, "mode": "auto", "started_with": started})
    target = make_target(settings)
    source = target.source(settings)
    controller = Controller(
        engine=target,
        policy=StaticPolicy({"max_batch": 128, "kv_level": 1}),
        audit=AuditLog(tmp_path / "audit.jsonl"),
        mode=Mode.AUTO,
        limits=GuardLimits(min_windows=1, max_age_seconds=60.0),
        source=source,
        window_seconds=1e-3,
        how_to_restart=target.how_to_restart,
    )
    decisions = [controller.tick() for _ in range(3)]
    source.close()
    target.close()
    proposals = [str(one) for decision in decisions for one in decision.proposals]
    assert any("--max-num-seqs 128" in one for one in proposals), decisions
    assert any("--kv-cache-dtype fp8_e4m3" in one for one in proposals)
    assert vllm.written == []
    assert all(not decision.changes for decision in decisions)


def test_the_sidecar_learns_nothing_and_needs_no_training_library(make_sidecar, engine, tmp_path):
    import subprocess
    import sys

    code = (
        "import sys, kvpilot.agent.control.run; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'optuna', 'stable_baselines3', 'gymnasium')))"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0
