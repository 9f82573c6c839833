import json
import subprocess
import sys
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvpilot.agent import cli, serve
from kvpilot.agent.control import run as run_module
from kvpilot.agent.control.nouns import Mode
from kvpilot.agent.demo import command as demo
from kvpilot.engine.config import EngineConfig, Knobs

FLAGS = {
    "serve": "admin-port admin-token-file device dtype eviction host kv-level ladder load-format max-batch "
    "max-batch-ceiling max-model-len max-waiting model page-size pool-bytes pool-mb port prefill-chunk record "
    "size-factor starvation-seconds threads ttl",
    "run": "admin-url audit config control-file counterfactual decision interval kill-file listen log-format "
    "min-change-seconds mode outside pod-name policy prometheus-url selector slo-itl slo-ttft source started-with "
    "state target timeout token-file url",
    "audit": "json knob last outcome reason replay since",
    "safe-mode": "leave state",
    "operator": "health-host health-port lease-seconds namespace resync",
    "demo": "model out pool-mb quick seconds-per-phase seed",
    "bench quality": "json model quick table threads windows",
    "knobs get": "admin-url json token-file",
    "knobs set": "admin-url expected-revision token-file",
}


def call(*args: str):
    return CliRunner().invoke(cli.app, args)


def flags_of(path: str) -> set[str]:
    command: Any = get_command(cli.app)
    for name in path.split():
        command = command.commands[name]
    options = [param for param in command.params if param.param_type_name == "option"]
    return {option.removeprefix("--") for param in options for option in param.opts} - {"help"}


@pytest.mark.parametrize("path", FLAGS)
def test_the_flags_are_these(path):
    assert flags_of(path) == set(FLAGS[path].split())


@pytest.mark.parametrize("path", ["", *FLAGS])
def test_help_shows_an_example(path):
    shown = call(*path.split(), "--help")
    assert shown.exit_code == 0
    assert f"autotune {path}".strip() in shown.output.replace("\n", " ")


def test_serve_parses_to_a_config(monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "run_server", lambda config: seen.append(config) or 0)
    call("serve", "--pool-mb", "32", "--ladder", "bf16,int8", "--ttl", "60", "--kv-level", "1", "--port", "0")
    (config,) = seen
    assert config.engine == EngineConfig(
        pool_bytes=32 << 20, ladder=("bf16", "int8"), knobs=Knobs(ttl_seconds=60.0, kv_level=1)
    )
    assert (config.model, config.port, config.admin_port) == ("smollm2", 0, 8001)
    assert config.admin_token_file.is_absolute()


def test_serve_without_flags_is_the_engines_default(monkeypatch):
    seen = []
    monkeypatch.setattr(serve, "run_server", lambda config: seen.append(config) or 0)
    call("serve")
    assert seen[0].engine == EngineConfig()


def test_run_and_demo_parse_to_a_config(monkeypatch):
    seen = []
    monkeypatch.setattr(run_module, "run_loop", lambda config: seen.append(config) or 0)
    monkeypatch.setattr(demo, "run_demo", lambda config: seen.append(config) or 0)
    call("run", "--mode", "auto", "--interval", "2")
    call("demo", "--quick", "--seed", "7")
    assert (seen[0].mode, seen[0].interval_seconds, seen[0].decision_seconds) == (Mode.AUTO, 2.0, None)
    assert (seen[1].seconds_per_phase, seen[1].seed) == (4.0, 7)


def test_run_is_advisory_unless_told_otherwise(monkeypatch):
    seen = []
    monkeypatch.setattr(run_module, "run_loop", lambda config: seen.append(config) or 0)
    call("run")
    assert seen[0].mode is Mode.ADVISORY


def autotune(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "kvpilot.agent.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("serve", "--page-size", "3"), 2, "page_size=3"),
        (("serve", "--dtype", "int2"), 2, "dtype='int2'"),
        (("serve", "--device", "tpu"), 2, "device='tpu'"),
        (("serve", "--load-format", "gguf"), 2, "load_format='gguf'"),
        (("serve", "--device", "cuda", "--dtype", "fp32"), 2, "dtype='fp32'"),
        (("run", "--policy", "magic"), 2, "policy='magic'"),
        (("run", "--token-file", "/nonexistent"), 2, "/nonexistent"),
        (("demo", "--pool-mb", "1"), 2, "pool_mb=1"),
        (("knobs", "set", "kv_level"), 2, "KNOB=VALUE"),
        (("knobs", "set", "kv_level=high"), 2, "kv_level='high'"),
    ],
)
def test_a_wrong_value_is_one_line_that_names_it(args, code, says):
    done = autotune(*args)
    assert done.returncode == code
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_an_unreachable_engine_is_one_line(tmp_path):
    (tmp_path / "token").write_text("x" * 16)
    where = ("--admin-url", "http://127.0.0.1:1", "--token-file", str(tmp_path / "token"))
    done = autotune("knobs", "get", *where)
    assert done.returncode == 1
    assert "does not answer" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_wrong_flag_is_a_usage_error():
    assert autotune("serve", "--turbo").returncode == 2


def test_version():
    assert call("--version").output.startswith("autotune ")


@pytest.mark.parametrize(
    "module", ["cli", "control.run", "control.controller", "demo.command", "knobs", "launch", "demo.report"]
)
def test_only_serve_needs_torch(module):
    code = f"import sys, kvpilot.agent.{module}; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0


def test_knobs_are_read_and_written(engine, token, tmp_path):
    (tmp_path / "token").write_text(token)
    where = ("--admin-url", engine.url, "--token-file", str(tmp_path / "token"))
    shown = call("knobs", "set", "kv_level=1", "max_batch=8", *where)
    assert "kv_level: applied" in shown.output
    assert engine.effective["max_batch"] == 8
    state = json.loads(call("knobs", "get", "--json", *where).output)
    assert state["effective"]["kv_level"] == 1
    assert state["revision"] == 2


def test_a_refused_knob_names_field_value_and_bounds(engine, token, tmp_path):
    (tmp_path / "token").write_text(token)
    where = ("--admin-url", engine.url, "--token-file", str(tmp_path / "token"))
    done = autotune("knobs", "set", "kv_level=9", *where)
    assert done.returncode == 2
    assert "kv_level=9 is invalid: expected an integer in [0, 2]" in done.stderr
    stale = autotune("knobs", "set", "kv_level=1", "--expected-revision", "99", *where)
    assert stale.returncode == 1
    assert "stale" in stale.stderr
    assert engine.effective["kv_level"] == 0
