"""The flags of tune and evaluate, and what they say to bad input."""

from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvpilot.agent import cli
from kvpilot.agent.jobs.workloads import Traffic, workload_of_trace
from kvpilot.agent.tune.result import TunedFormError
from kvpilot.engine.errors import ConfigError, KVPilotError

FLAGS = {
    "tune": "cache episodes max-quality-loss min-goodput minutes only out pareto portfolio quick regime-trials "
    "rule-trials seed slo-itl slo-ttft storage study trace traces trials users workers workload",
    "evaluate": "cache episodes only oracle oracle-every oracle-seconds out peers policy quick seed slo-itl slo-ttft "
    "split trace traces tuned users workers workload",
}


def raised_by(*args: str) -> BaseException | None:
    return CliRunner().invoke(cli.app, args).exception


@pytest.fixture(autouse=True)
def no_traces(monkeypatch, tmp_path):
    monkeypatch.delenv("KVPILOT_TRACES", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_are_these(name):
    command: Any = get_command(cli.app)
    options = [param for param in command.commands[name].params if param.param_type_name == "option"]
    assert {option.removeprefix("--") for param in options for option in param.opts} - {"help", "-o"} == set(
        FLAGS[name].split()
    )


def test_without_traces_it_says_how_to_name_them(tmp_path):
    for options in ((), ("--traces", str(tmp_path / "missing"))):
        error = raised_by("tune", *options)
        assert isinstance(error, KVPilotError)
        assert "traces" in str(error) or "missing" in str(error)


def test_an_evaluation_needs_what_was_tuned(tmp_path):
    error = raised_by("evaluate", "--traces", str(tmp_path), "--tuned", "tuned.json")
    assert isinstance(error, TunedFormError)
    assert "make it anew" in str(error)


def test_what_was_tuned_for_another_workload_is_refused(tuned, folder):
    tuned.write(folder / "tuned.json")
    error = raised_by(
        "evaluate", "--trace", str(folder / "sessions.jsonl"), "--tuned", str(folder / "tuned.json")
    )
    assert isinstance(error, TunedFormError)
    assert "other workloads: sessions" in str(error)


def test_a_trace_becomes_a_workload_at_its_recorded_rate(folder):
    workload = workload_of_trace(folder / "sessions.jsonl")
    low, high = workload.regimes["recorded"].levels["trace"]
    assert low < 100 / 60 < high
    closed = workload_of_trace(folder / "sessions.jsonl", users=5)
    assert closed.streams["trace"].loop == "closed"


def test_an_slo_of_zero_is_refused_not_taken_for_none(folder):
    with pytest.raises(ConfigError, match="slo ttft_seconds=0"):
        Traffic(trace=folder / "sessions.jsonl", slo_ttft_seconds=0.0).workloads("train")
    traffic = Traffic(trace=folder / "sessions.jsonl", slo_ttft_seconds=3.0)
    (workload,) = traffic.workloads("train").values()
    assert (workload.slo.ttft_seconds, workload.slo.inter_token_seconds) == (3.0, 0.1)


def test_traffic_that_contradicts_itself_is_refused(folder, tmp_path):
    trace = folder / "sessions.jsonl"
    with pytest.raises(ConfigError, match="expected one of them"):
        Traffic(files=(trace,), trace=trace)
    with pytest.raises(ConfigError, match="users=3"):
        Traffic(traces=tmp_path, users=3)
    with pytest.raises(ConfigError, match="only='bursts' is invalid: expected some of sessions"):
        Traffic(trace=trace, only=("bursts",)).workloads("train")
    slo = Traffic(trace=trace, slo_ttft_seconds=3.0).workloads("test")["sessions"]
    assert (slo.slo.ttft_seconds, slo.split) == (3.0, "test")
