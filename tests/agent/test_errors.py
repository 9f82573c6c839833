"""What a wrong command line says, and how it ends: 2 for what was given and cannot be used, 1 for what failed."""

import json
import signal
import sys

import pytest

from kvpilot.agent import cli
from kvpilot.agent.control import run


@pytest.fixture
def fails(monkeypatch, capsys, tmp_path):
    """Runs `autotune` in a folder of its own: its exit code and the one line that it says."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVPILOT_TRACES", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process keeps its handlers
    monkeypatch.setattr(run, "set_up_logging", lambda log_format: None)
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "junk.txt").write_text("junk")
    (tmp_path / "token").write_text("x" * 16)

    def fails(*arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["autotune", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr().err
        assert len(said.splitlines()) == 1, said
        return int(str(ended.value.code)), said

    return fails


NOWHERE = ("--admin-url", "http://127.0.0.1:1", "--token-file", "token")


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("audit nosuch", 2, "nosuch"),
        ("audit junk.txt", 2, "junk.txt"),
        ("safe-mode --state junk.txt", 2, "junk.txt"),
        ("safe-mode --state nosuch", 2, "state='nosuch' does not exist"),
        ("safe-mode --state nosuch --leave", 2, "state='nosuch' does not exist"),
        ("run --policy nosuch --token-file token", 2, "nosuch"),
        ("run --policy static:nosuch --token-file token", 2, "nosuch"),
        ("run --policy junk.txt --token-file token", 2, "junk.txt is no exported policy"),
        ("run --config nosuch.yaml", 2, "nosuch.yaml"),
        ("run --audit no/such.jsonl --token-file token", 2, "no/such.jsonl"),
        ("run --state no/such --token-file token", 2, "no/such"),
        ("replay nosuch", 2, "nosuch"),
        ("replay --compare junk.txt nosuch", 2, "junk.txt"),
        ("trace info nosuch", 2, "nosuch"),
        ("calibrate --out x.json --fit-only nosuch", 2, "nosuch"),
        ("knobs set kv_level=", 2, "'kv_level=' is invalid: expected KNOB=VALUE"),
        (" ".join(("knobs", "get", *NOWHERE)), 1, "does not answer"),
    ],
)
def test_an_exit_code_tells_what_was_given_from_what_failed(fails, command, code, says):
    ended, said = fails(*command.split())
    assert ended == code
    assert says in said


@pytest.mark.parametrize(
    "command",
    [
        "replay empty.jsonl",
        "sensitivity --trace empty.jsonl",
        "trace info empty.jsonl",
        "tune --trace empty.jsonl",
        "train --trace empty.jsonl",
    ],
)
def test_an_empty_trace_is_said_to_be_empty(fails, command):
    if command.startswith("t") and not command.startswith("trace"):
        pytest.importorskip("optuna")
        pytest.importorskip("stable_baselines3")
    ended, said = fails(*command.split())
    assert ended == 2
    assert "empty.jsonl: the file is empty" in said


def test_a_policy_that_is_none_is_named_as_it_was_given(fails):
    _, said = fails("run", "--policy", "junk.txt", "--token-file", "token")
    assert "static:junk.txt" in said
    assert "/policy.json" not in said


def test_a_value_of_a_file_is_not_said_to_be_an_options(fails, tmp_path):
    (tmp_path / "run.yaml").write_text("interval_seconds: 0\n")
    _, of_the_file = fails("run", "--config", "run.yaml")
    assert of_the_file.startswith("autotune: interval_seconds=0 is invalid")
    _, of_the_option = fails("run", "--interval", "0")
    assert of_the_option.startswith("autotune: --interval: interval_seconds=0")
    _, joined = fails("run", "--interval=0")
    assert joined == of_the_option


def test_a_knob_is_not_an_option(fails):
    _, said = fails("knobs", "set", "kv_level=high")
    assert said.startswith("autotune: kv_level='high' is invalid: expected a number")


def test_leaving_safe_mode_releases_the_latch(monkeypatch, capsys, tmp_path):
    state = tmp_path / "state.json"
    state.write_text(json.dumps({"safe_mode": "4 reverts", "reverts": [1.0], "trial": None}))
    shown = []
    for more in ((), ("--leave",)):
        monkeypatch.setattr(sys, "argv", ["autotune", "safe-mode", "--state", str(state), *more])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
        shown.append(capsys.readouterr().out.splitlines())
    assert shown == [["latched: 4 reverts", "1 reverts remembered"], ["not latched", "0 reverts remembered"]]
