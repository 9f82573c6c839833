"""The loop and the demo as whole processes, stopped in every way."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

AUTOTUNE = [sys.executable, "-P", "-m", "kvpilot.agent.cli"]


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.05)


@contextmanager
def loop(engine, token, tmp_path):
    """`autotune run` in mode auto against the fake engine."""
    (tmp_path / "token").write_text(token)
    where = ["--url", engine.url, "--admin-url", engine.url, "--token-file", str(tmp_path / "token")]
    pace = ["--config", str(tmp_path / "fast.yaml")]
    fast = {
        "interval_seconds": 0.1,
        "decision_seconds": 0.1,
        "guard": {"min_change_seconds": 0},
        "slo": {"ttft_p99_seconds": None},  # nothing to judge a change by: it is not waited for
    }
    (tmp_path / "fast.yaml").write_text(json.dumps({**fast, "state": str(tmp_path / "state.json")}))
    audit = ["--audit", str(tmp_path / "audit.jsonl")]
    command = [*AUTOTUNE, "run", "--mode", "auto", *where, *pace, *audit]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_however_the_loop_ends_the_knobs_stay_and_the_audit_is_whole(engine, token, tmp_path, number):
    engine.press()
    with loop(engine, token, tmp_path) as process:
        wait_until(lambda: engine.effective["kv_level"] == 2)
        process.send_signal(number)
        assert process.wait(10) == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    assert engine.effective["kv_level"] == 2
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    intents = [line for line in lines if line["kind"] == "intent"]
    assert len(intents) == len(engine.patches)


@pytest.mark.e2e
def test_a_loop_started_again_goes_on_from_the_knobs_it_finds(engine, token, tmp_path):
    engine.press()
    for level in (1, 2):
        with loop(engine, token, tmp_path) as process:
            wait_until(lambda: engine.effective["kv_level"] >= level)  # noqa: B023 - called at once
            process.kill()
    assert engine.effective["kv_level"] == 2


@pytest.mark.e2e
def test_the_loop_outlives_an_engine_that_goes_away(engine, token, tmp_path):
    engine.fail = {"GET": 503}
    with loop(engine, token, tmp_path) as process:
        assert process.stderr is not None
        while "engine-unreachable" not in process.stderr.readline():
            assert process.poll() is None
        engine.fail = {}
        engine.press()
        wait_until(lambda: engine.effective["kv_level"] == 2)


@pytest.mark.model
@pytest.mark.e2e
@pytest.mark.parametrize(
    ("number", "handler"),
    [(signal.SIGINT, signal.SIG_DFL), (signal.SIGTERM, signal.SIG_IGN)],
    ids=["SIGINT", "SIGTERM under nohup"],
)
def test_an_interrupted_demo_leaves_a_partial_report_and_no_server(tmp_path, number, handler):
    process = subprocess.Popen(
        [*AUTOTUNE, "demo", "--quick", "--out", str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, handler),
    )
    assert process.stdout is not None
    while "burst" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(number)
    process.communicate(timeout=240)  # a report on a busy machine
    assert process.returncode == 1
    data = json.loads((tmp_path / "run.json").read_text())
    assert data["problem"].startswith("Interrupted")
    assert data["runs"][0]["samples"]
    assert "Interrupted" in (tmp_path / "report.html").read_text()
    assert not servers_with(str(tmp_path))


@pytest.mark.model
@pytest.mark.e2e
def test_a_server_that_dies_in_the_demo_is_reported(tmp_path):
    process = subprocess.Popen(
        [*AUTOTUNE, "demo", "--quick", "--out", str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while "burst" not in process.stdout.readline():
        assert process.poll() is None
    (server,) = servers_with(str(tmp_path))
    os.kill(server, signal.SIGKILL)
    said, _ = process.communicate(timeout=240)  # a report on a busy machine
    assert process.returncode == 1
    assert "ended with code -9" in said
    data = json.loads((tmp_path / "run.json").read_text())
    assert all(result["status"] in ("done", "failed", "cut off") for result in data["runs"][0]["results"])


def servers_with(word: str) -> list[int]:
    """Ids of the `serve` processes whose command line names this folder."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    command = file.read().decode(errors="replace").split("\0")
            except OSError:
                continue
            if "serve" in command and any(part.startswith(word) for part in command):
                found.append(int(entry))
    return found
