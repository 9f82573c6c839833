"""`autotune replay` and `autotune sensitivity`, from the command line to the files."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kvpilot.agent.cli import app
from kvpilot.engine.errors import KVPilotError
from kvpilot.env.replay.result import read_result
from kvpilot.env.traces.files import write_trace

SMALL = ["--pool-mb", "60", "--seconds", "30", "--page-size", "8"]


@pytest.fixture
def trace_file(tmp_path, chats):
    write_trace(chats, tmp_path / "chats.jsonl")
    return tmp_path / "chats.jsonl"


def run(*arguments) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_a_replay_writes_a_result_and_a_page_and_two_are_compared(tmp_path, trace_file):
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    run("replay", trace_file, *SMALL, "--out", a)
    output = run("replay", trace_file, *SMALL, "--kv-level", 2, "--eviction", "hazard", "--out", b)
    assert "Prefix hit rate" in output
    result = read_result(b)
    assert result.config["engine"]["knobs"]["kv_level"] == 2
    assert result.config["engine"]["eviction"] == "hazard"
    assert result.trace["name"] == "chats.jsonl"
    assert result.provenance["command"].startswith("autotune")
    output = run("replay", "--compare", a, b, "--out", tmp_path / "ab.html")
    assert "change" in output
    assert {path.name for path in tmp_path.glob("*.html")} == {"a.html", "b.html", "ab.html"}


def test_the_console_says_what_was_refused_and_why(tmp_path, trace_file):
    output = run("replay", trace_file, *SMALL, "--pool-mb", 8, "--out", tmp_path / "a.json")
    assert "Requests refused" in output
    words = " ".join(output.split())
    assert "prompt too long" in words
    assert "percentiles are over the" in words


def test_nothing_answered_is_said(tmp_path, trace_file):
    output = run("replay", trace_file, *SMALL, "--pool-mb", 6, "--out", tmp_path / "a.json")
    words = " ".join(output.split())
    assert "no request was answered" in words
    assert "percentiles are over" not in words
    assert "no request was" in (tmp_path / "a.html").read_text()
    assert read_result(tmp_path / "a.json").summary["reasons"]["refused"]


def test_sensitivity_writes_table_and_plots(tmp_path, trace_file):
    out = tmp_path / "s.json"
    output = run("sensitivity", "--trace", trace_file, *SMALL, "--at", "max_batch=4,kv_level=1", "--out", out)
    values = json.loads(out.read_text())
    assert values["best"]["kv_level"] == 1
    assert {point["knob"] for point in values["points"]} == {
        "ttl_seconds",
        "size_factor",
        "max_batch",
        "kv_level",
    }
    assert "kv_level moves" in output
    assert values["is_partial"] is False
    assert values["unfinished"] == {}
    assert "plotly" in out.with_suffix(".html").read_text().lower()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "x.txt"], "out="),
        (["--out", "no/such/folder/x.json"], "no folder"),
        (["--profile", "nothing"], "h200-llama3-8b"),
        (["--on", "server:80"], "url="),
        (["--on", "http://127.0.0.1:9", "--users", "3"], "users"),
        (["--slo-ttft", "0"], "slo ttft_seconds"),
        (["--eviction", "belady", "--users", "2"], "belady"),
        (["--kv-level", "7"], "kv_level"),
        (["--window", "0"], "--window=0 "),
        (["--window", "nan"], "--window=nan "),
        (["--window", "0.0001"], "at most 10,000"),
        (["--seconds", "0"], "--seconds=0 "),
        (["--seconds", "-5"], "--seconds=-5 "),
        (["--seconds", "nan"], "--seconds=nan "),
        (["--sample", "nan"], "--sample=nan "),
        (["--session-rate", "-1"], "--session-rate=-1 "),
        (["--drain", "nan"], "--drain=nan "),
        (["--max-batch", "300"], "--max-batch=300 .* at most 256, the max_batch_ceiling"),
    ],
)
def test_wrong_use_is_told_before_work(tmp_path, monkeypatch, trace_file, arguments, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KVPilotError, match=message):
        run("replay", trace_file, *arguments)
    assert not list(tmp_path.glob("*.html"))


def test_a_comparison_overwrites_no_page_of_its_inputs(tmp_path, monkeypatch, trace_file):
    monkeypatch.chdir(tmp_path)
    run("replay", trace_file, *SMALL)
    run("replay", trace_file, *SMALL, "--out", "b.json")
    before = (tmp_path / "replay.html").read_bytes()
    run("replay", "--compare", "replay.json", "b.json")
    assert (tmp_path / "compared.html").exists()
    assert (tmp_path / "replay.html").read_bytes() == before
    for out, message in (("b.html", "overwrite"), ("x.json", "ends in .html"), ("no/x.html", "no folder")):
        with pytest.raises(KVPilotError, match=message):
            run("replay", "--compare", "replay.json", "b.json", "--out", out)
    with pytest.raises(KVPilotError, match="--users, --kv-level with"):
        run("replay", "--compare", "replay.json", "b.json", "--kv-level", 1, "--users", 2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--page-size", 0),
        ("--max-batch", 0),
        ("--seed", -1),
        ("--users", 0),
        ("--max-tokens", 0),
        ("--kv-level", -1),
        ("--pool-mb", 0),
        ("--vocab-size", 1),
    ],
)
def test_whole_numbers_out_of_range_are_refused(trace_file, option, value):
    result = CliRunner().invoke(app, ["replay", str(trace_file), option, str(value)])
    assert result.exit_code == 2
    assert option in result.output


def test_absurd_pools_and_profiles_without_losses_are_refused(tmp_path, replay, trace_file):
    with pytest.raises(KVPilotError, match="--pool-mb"):
        run("replay", trace_file, "--pool-mb", 10**15, "--out", tmp_path / "a.json")
    path = tmp_path / "mine.json"
    replace(replay.profile, quality_loss={"int8": 0.001}).write(path)
    options = ["--profile", path, "--pool-mb", 1, "--out", tmp_path / "a.json"]
    run("replay", trace_file, *options, "--kv-level", 1)
    with pytest.raises(KVPilotError, match="no quality_loss for int4"):
        run("replay", trace_file, *options, "--kv-level", 2)
    with pytest.raises(KVPilotError, match="no quality_loss for int4"):
        run("sensitivity", "--trace", trace_file, *options)


@pytest.mark.parametrize("weight", ["nan", "-1"])
def test_a_quality_weight_is_a_number_of_at_least_0(tmp_path, trace_file, weight):
    with pytest.raises(KVPilotError, match=f"--quality-weight={weight} "):
        run("sensitivity", "--trace", trace_file, "--quality-weight", weight, "--out", tmp_path / "s.json")


def test_names_with_brackets_are_shown_as_they_are(tmp_path, trace_file):
    output = run("replay", trace_file, *SMALL, "--out", tmp_path / "a[red].json")
    header = next(line for line in output.splitlines() if line.startswith("\u2503"))
    assert "a[red]" in header
    assert "a[red].html" in "".join(output.split())


def test_comparing_one_result_is_refused(tmp_path):
    with pytest.raises(KVPilotError, match="two or more"):
        run("replay", "--compare", tmp_path / "a.json")
