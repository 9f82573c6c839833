"""The command line: its flags, and what it refuses before any work."""

from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvpilot.agent import cli
from kvpilot.agent.training import command
from kvpilot.agent.training.config import TrainConfig, quick, to_toml
from kvpilot.engine.errors import ConfigError

FLAGS = "config only out quick resume search seeds slo-itl slo-ttft trace traces tuned users workers workload"
TRAFFIC = ("--workload", "small.toml")


def call(*args: str):
    return CliRunner().invoke(cli.app, ["train", *args])


@pytest.fixture
def requests(monkeypatch, workload):
    """What would be run."""
    seen: list[Any] = []
    monkeypatch.setattr(command, "run_train", lambda request, resume: seen.append((request, resume)) or 0)
    monkeypatch.setattr(command, "run_search", lambda request, trials: seen.append((request, trials)) or 0)
    monkeypatch.setattr(
        "kvpilot.agent.jobs.workloads.Traffic.workloads", lambda self, split: {workload.name: workload}
    )
    return seen


def test_the_flags_are_these():
    parsed: Any = get_command(cli.app)
    options = [param for param in parsed.commands["train"].params if param.param_type_name == "option"]
    assert {option.removeprefix("--") for param in options for option in param.opts} - {"help", "-o"} == set(
        FLAGS.split()
    )


def test_help_shows_an_example():
    shown = call("--help")
    assert shown.exit_code == 0
    assert "autotune train --traces" in shown.output.replace("\n", " ")


def test_flags_win_over_the_file_and_the_file_over_defaults(requests, tmp_path):
    path = tmp_path / "some.toml"
    path.write_text("seeds = 2\nworkers = 3\n")
    call(*TRAFFIC, "--config", str(path), "--seeds", "4")
    call(*TRAFFIC, "--quick")
    call(*TRAFFIC, "--search", "7")
    (request, resume), (fast, _), (_, trials) = requests
    assert request.config == TrainConfig(seeds=4, workers=3)
    assert not resume
    assert fast.config == quick(one_workload=False)
    assert trials == 7
    assert request.command.startswith("autotune")


def test_resume_takes_the_config_of_the_folder_and_no_other(requests, tmp_path):
    (tmp_path / "config.toml").write_text(to_toml(TrainConfig(seeds=9)))
    assert call(*TRAFFIC, "--resume", "--out", str(tmp_path)).exit_code == 0
    ((request, resume),) = requests
    assert request.config.seeds == 9
    assert resume
    refused = call(*TRAFFIC, "--resume", "--out", str(tmp_path), "--seeds", "2")
    assert isinstance(refused.exception, ConfigError)
    assert "--resume goes on with the settings" in str(refused.exception)


def test_without_traffic_it_says_how_to_name_it(monkeypatch):
    monkeypatch.delenv("KVPILOT_TRACES", raising=False)
    assert "--traces" in str(call().exception)
