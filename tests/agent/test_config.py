"""Configuration from flags, environment and file, validated at start."""

import json

import pytest

from kvpilot.agent.control.config import load_settings
from kvpilot.agent.control.in_force import guard_limits, paces
from kvpilot.agent.control.nouns import Mode
from kvpilot.engine.errors import ConfigError
from kvpilot.k8s.control_document import ControlDocument, Limits, Slo


@pytest.fixture(autouse=True)
def no_environment(monkeypatch):
    import os

    for name in list(os.environ):
        if name.startswith("KVPILOT_"):
            monkeypatch.delenv(name)


def test_flags_win_over_environment_over_file_over_defaults(tmp_path, monkeypatch):
    path = tmp_path / "run.toml"
    path.write_text(
        'mode = "auto"\ninterval_seconds = 7.0\nurl = "http://file:1"\n[slo]\nttft_p99_seconds = 3.0\n'
    )
    monkeypatch.setenv("KVPILOT_INTERVAL_SECONDS", "9")
    monkeypatch.setenv("KVPILOT_URL", "http://environment:1")
    monkeypatch.setenv("KVPILOT_SLO__VIOLATION_SHARE", "0.01")
    settings = load_settings({"url": "http://flag:1"}, path)
    assert settings.mode is Mode.AUTO
    assert paces(settings) == (9.0, 60.0)
    assert settings.url == "http://flag:1"
    assert (settings.slo.ttft_p99_seconds, settings.slo.violation_share) == (3.0, 0.01)


def test_advisory_15_and_60_seconds_are_the_default():
    settings = load_settings({})
    assert settings.mode is Mode.ADVISORY
    assert paces(settings) == (15.0, 60.0)


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_yaml_and_json_are_read(tmp_path, suffix):
    path = tmp_path / f"run{suffix}"
    path.write_text(json.dumps({"policy": "default", "bounds": {"max_batch": [2, None]}}))
    settings = load_settings({}, path)
    assert settings.policy == "default"
    assert settings.bounds == {"max_batch": (2, None)}


def test_an_unquoted_off_is_off(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("mode: off\n")
    assert load_settings({}, path).mode is Mode.OFF


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"mode": "fast"}, r"mode='fast' is invalid.*'auto'"),
        ({"modus": "auto"}, r"modus='auto' is invalid: there is no such setting"),
        ({"slo": {"ttft_p99_seconds": 0}}, r"slo\.ttft_p99_seconds=0 is invalid: .*greater than 0"),
        ({"slo": {"ttft": 1}}, r"slo\.ttft=1 is invalid: there is no such setting"),
        ({"interval_seconds": 0}, "interval_seconds=0 is invalid"),
        (
            {"interval_seconds": 90, "decision_seconds": 60},
            "decision_seconds=60 is invalid: expected at least interval_seconds=90",
        ),
        ({"mode": "canary"}, "needs a control_file"),
        ({"bounds": {"max_batch": [9, 2]}}, r"bounds\.max_batch=\(9, 2\) is invalid: expected low <= high"),
        ({"bounds": {"gpu": [1, 2]}}, "gpu"),
        ({"listen": "9464"}, "expected HOST:PORT"),
        ({"source": "carrier pigeon"}, "source='carrier pigeon' is invalid"),
    ],
)
def test_a_wrong_setting_is_one_line_that_names_it(tmp_path, content, says):
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=says) as caught:
        load_settings({}, path)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_says_so(tmp_path):
    for name, says in (("none.yaml", "no such file"), ("run.ini", "ends in .yaml")):
        with pytest.raises(ConfigError, match=says):
            load_settings({}, tmp_path / name)
    (tmp_path / "torn.yaml").write_text("mode: [")
    with pytest.raises(ConfigError, match="is not understood"):
        load_settings({}, tmp_path / "torn.yaml")


def test_the_control_document_replaces_what_it_names_and_no_more():
    settings = load_settings({"slo": {"ttft_p99_seconds": 4.0}})
    document = ControlDocument(
        revision=1,
        slo=Slo(inter_token_p99_milliseconds=150, violation_permille=10, quality_loss_micronats=2000),
        limits=Limits(interval_seconds=5, settle_seconds=30, max_reverts_per_hour=0),
    )
    limits = guard_limits(settings, document)
    assert (limits.slo.ttft_p99_seconds, limits.slo.inter_token_p99_seconds) == (4.0, 0.15)
    assert (limits.slo.violation_share, limits.quality_loss_budget) == (0.01, 0.002)
    assert (limits.settle_seconds, limits.max_reverts_per_hour) == (30.0, 0)
    assert limits.min_interval_seconds["kv_level"] == 30.0
    assert paces(settings, document) == (5.0, 60.0)


def test_a_secret_is_not_shown():
    settings = load_settings({"admin_token": "do-not-log-me"})
    assert "do-not-log-me" not in repr(settings)


def test_a_recording_or_statistics_not_both():
    with pytest.raises(ConfigError, match="exclude each other"):
        load_settings({"counterfactual": {"trace": "traffic.jsonl", "statistics": True}})


@pytest.mark.parametrize(
    "prometheus",
    [
        {"bearer_token": "very-secret", "bearer_token_file": "/token"},
        {"bearer_token": "very-secret", "headers": {"authorization": "Basic very-secret"}},
        {"bearer_token": "very-secret\n"},
        {"headers": {"X-Scope-OrgID": ["very-secret"]}},
        {"headers": "very-secret"},
        {"headers": {"X Y\r\n": "very-secret"}},
        {"bearer_token": "very-secret", "selector": "not a mapping"},
    ],
)
def test_no_error_shows_a_secret(prometheus, monkeypatch):
    with pytest.raises(ConfigError) as refused:
        load_settings({"prometheus": prometheus})
    assert "very-secret" not in str(refused.value)
    monkeypatch.setenv("KVPILOT_PROMETHEUS__BEARER_TOKEN", "very-secret")
    assert "very-secret" not in repr(load_settings({}))
