import json
import subprocess
import sys

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from kvpilot.agent import cli
from kvpilot.agent.commands import trace
from kvpilot.agent.simulate.trace_report import make_charts, rows
from kvpilot.engine.errors import KVPilotError
from kvpilot.env.traces.compose import scale_arrivals
from kvpilot.env.traces.files import write_trace
from kvpilot.env.traces.readers import read_trace
from kvpilot.env.traces.summary import summarize

READING = "format session-rate skip-bad seed block-size "
FLAGS = {
    "info": READING + "html json sizes",
    "convert": READING,
    "compose": READING
    + "out o spec combine switch-at window sample scale curve curve-client curve-seconds requests "
    "shrink max-tokens max-prompt-tokens max-output-tokens",
}


def call(*args: object):
    return CliRunner().invoke(cli.app, ["trace", *map(str, args)])


def error_of(*args: object) -> str:
    """What a call that fails says, as one of ours."""
    done = call(*args)
    assert isinstance(done.exception, KVPilotError), done.output
    return str(done.exception)


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_are_these(name):
    command = get_command(trace.app).commands[name]  # pyright: ignore[reportAttributeAccessIssue]
    options = [param for param in command.params if param.param_type_name == "option"]
    assert {option.lstrip("-") for param in options for option in param.opts} == set(FLAGS[name].split())


@pytest.mark.parametrize("name", ["", *FLAGS])
def test_help_shows_an_example(name):
    shown = call(*name.split(), "--help")
    assert shown.exit_code == 0
    assert f"trace {name}".strip() in shown.output


def test_info_says_what_the_summary_says(talk, data, tmp_path):
    trace = talk(1, num_sessions=20).trace(4)
    write_trace(trace, tmp_path / "t.jsonl")
    page = tmp_path / "info.html"
    done = call("info", tmp_path / "t.jsonl", data / "azure.csv", "--json", "--sizes", "5,50", "--html", page)
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert set(printed) == {"t.jsonl", "azure.csv"}
    expected = json.loads(json.dumps(summarize(trace, sizes=[5, 50]).as_dict()))
    assert printed["t.jsonl"] | {"provenance": []} == expected
    text = page.read_text()
    assert "<title>Traffic: t.jsonl, azure.csv</title>" in text
    assert "Plotly.newPlot" in text
    assert "http://" not in text.split("<script>")[0]


def test_info_prints_a_table(data):
    shown = call("info", data / "mooncake.jsonl")
    assert shown.exit_code == 0
    assert "hit rate, infinite" in shown.output


def test_the_figures_of_a_summary(talk):
    """Counted by hand: one session of turns at 0, 10 and 30 s over 30 s."""
    source = talk(3, num_sessions=1, max_turns=12)
    source.arrivals, source.sessions, source.turns = [0.0, 10.0, 30.0], [0, 0, 0], [1, 2, 3]
    trace = source.trace(4)
    lengths = sorted(len(p) for p in source.prompts)
    summary = summarize(trace)
    assert (summary.requests, summary.sessions, summary.tenants) == (3, 1, 1)
    assert summary.requests_per_second == pytest.approx(0.1)
    assert summary.input_tokens_per_second == pytest.approx(sum(lengths) / 30)
    assert (summary.input_tokens["p1"], summary.input_tokens["p50"], summary.input_tokens["p99"]) == tuple(
        lengths
    )
    assert summary.next_turn_share == [1.0, 1.0, 0.0]
    assert (summary.turn_gap_seconds["p50"], summary.turn_gap_seconds["p90"]) == (10.0, 20.0)
    assert sum(summary.over_time["requests_per_second"]) * 30 / 80 == pytest.approx(3)
    assert summary.arrival_cv == pytest.approx(1 / 3)


def test_a_trace_of_one_request_has_a_summary(data):
    one = read_trace(data / "azure.csv")[:1]
    named = [("one", summarize(one))]
    assert dict(rows(named))["requests"] == ["1"]
    assert all(chart["traces"] for chart in make_charts(named))


def test_compose_by_flags(talk, tmp_path):
    trace = talk(1, num_sessions=30).trace(4)
    write_trace(trace, tmp_path / "a.jsonl")
    done = call("compose", tmp_path / "a.jsonl", "--scale", 0.5, "--seed", 4, "-o", tmp_path / "b.jsonl.gz")
    assert done.exit_code == 0, done.output
    assert "requests over" in done.output
    made = read_trace(tmp_path / "b.jsonl.gz")
    expected = scale_arrivals(trace, 0.5, seed=4)
    assert made.arrival_seconds.tolist() == expected.arrival_seconds.tolist()
    assert [step["step"] for step in made.provenance] == ["read", "scale_arrivals", "read"]
    call("compose", tmp_path / "a.jsonl", "--scale", 0.5, "--seed", 4, "-o", tmp_path / "c.jsonl.gz")
    assert (tmp_path / "c.jsonl.gz").read_bytes() == (tmp_path / "b.jsonl.gz").read_bytes()


def test_compose_by_spec(talk, tmp_path):
    write_trace(talk(1).trace(4), tmp_path / "a.jsonl")
    spec = tmp_path / "s.toml"
    spec.write_text("combine = 'concatenate'\n[[sources]]\nfile = 'a.jsonl'\n[[sources]]\nfile = 'a.jsonl'\n")
    assert call("compose", "--spec", spec, "-o", tmp_path / "b.jsonl").exit_code == 0
    assert len(read_trace(tmp_path / "b.jsonl")) == 2 * len(talk(1).prompts)


def test_skipped_records_are_reported(data, tmp_path):
    (tmp_path / "t").write_text((data / "mooncake.jsonl").read_text() + "nonsense\n")
    out = tmp_path / "o.jsonl"
    for command in (
        ("info", tmp_path / "t"),
        ("convert", tmp_path / "t", out),
        ("compose", tmp_path / "t", "-o", out),
    ):
        shown = call(*command, "--skip-bad")
        assert shown.exit_code == 0, shown.output
        assert "skipped 1 bad records; the first:" in shown.stderr
        assert "line 4: not JSON" in shown.stderr


def test_convert_to_other_blocks(data, tmp_path):
    assert call("convert", data / "mooncake.jsonl", tmp_path / "o.jsonl", "--block-size", 64).exit_code == 0
    trace = read_trace(tmp_path / "o.jsonl")
    assert trace.block_size == 64
    assert trace.num_full_blocks.tolist() == [17, 10, 25]


@pytest.mark.parametrize(
    ("args", "code", "says"),
    [
        (("info", "/nonexistent"), 2, "/nonexistent: no such file"),
        (("convert", "/nonexistent", "o.txt"), 2, "output='o.txt' is invalid"),
        (
            ("compose", "/nonexistent", "--combine", "blend", "-o", "o.jsonl"),
            2,
            "--combine='blend' is invalid",
        ),
    ],
)
def test_what_is_wrong_is_one_line(args, code, says):
    command = [sys.executable, "-P", "-m", "kvpilot.agent.cli", "trace", *args]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert says in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


@pytest.mark.parametrize("link", [None, "symlink_to", "hardlink_to"])
def test_a_source_is_never_overwritten(data, tmp_path, link):
    source, target = tmp_path / "a.jsonl", tmp_path / ("a.jsonl" if link is None else "b.jsonl")
    recorded = (data / "mooncake.jsonl").read_bytes()
    source.write_bytes(recorded)
    if link is not None:
        getattr(target, link)(source)
    spec = tmp_path / "s.toml"
    spec.write_text("[[sources]]\nfile = 'a.jsonl'\n")
    for command in (
        ("convert", source, target),
        ("compose", data / "azure.csv", source, "-o", target),
        ("compose", data / "azure.csv", "--curve", source, "-o", target),
        ("compose", "--spec", spec, "-o", target),
        ("info", source, "--html", target),
    ):
        assert "is the same file as the source" in error_of(*command)
    assert source.read_bytes() == target.read_bytes() == recorded


def test_flags_beside_a_spec_are_refused_by_name(data, tmp_path):
    spec = tmp_path / "s.toml"
    spec.write_text(f"[[sources]]\nfile = '{data / 'azure.csv'}'\n")
    out = tmp_path / "o.jsonl"
    shown = call("compose", "--spec", spec, "--scale", 3, "--seed", 0, "--combine", "mix", "-o", out)
    assert shown.exit_code == 2
    for flag in ("--scale", "--seed", "--combine"):
        assert flag in shown.stderr
    assert not out.exists()
    assert call("compose", "--spec", spec, "-o", out).exit_code == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--shrink", 3), "--shrink=3 is invalid: expected a divisor of 512"),
        (("--block-size", 100), "--block-size=100 is invalid"),
        (("--format", "csv"), "--format='csv' is invalid"),
        (("--window", "9000:9001"), "--window=[9000, 9001) is invalid"),
        (("--max-tokens", 1), "--max-tokens=1 is invalid"),
    ],
)
def test_errors_name_the_flag(data, tmp_path, flags, says):
    assert error_of("compose", data / "mooncake.jsonl", *flags, "-o", tmp_path / "o.jsonl").startswith(says)


def test_errors_of_a_spec_name_its_key(data, tmp_path):
    spec = tmp_path / "s.toml"
    for seed, key, says in ((0, "shrink = 3", "shrink=3 is invalid"), (-1, "", "seed=-1 is invalid")):
        spec.write_text(f"seed = {seed}\n[[sources]]\nfile = '{data / 'mooncake.jsonl'}'\n{key}\n")
        shown = error_of("compose", "--spec", spec, "-o", tmp_path / "o.jsonl")
        assert shown.startswith(f"{spec}: {says}")


@pytest.mark.parametrize(
    "flags",
    [
        ("--seed", -1),
        ("--scale", 0),
        ("--scale", "nan"),
        ("--sample", 1.5),
        ("--session-rate", 0),
        ("--shrink", 0),
        ("--block-size", 0),
        ("--switch-at", 5),
        ("--combine", "switch"),
        ("--combine", "switch", "--switch-at", 5, "--switch-at", 9),
        ("--combine", "switch", "--switch-at", "nan"),
        ("--curve-seconds", 60),
    ],
)
def test_values_out_of_bounds_are_wrong_usage_and_name_the_flag(data, tmp_path, flags):
    file = data / "mooncake.jsonl"
    shown = call("compose", file, file, *flags, "-o", tmp_path / "o.jsonl")
    assert shown.exit_code == 2
    assert flags[-2] in shown.stderr


@pytest.mark.parametrize("command", ["info", "convert", "compose"])
def test_seeds_are_not_negative(data, tmp_path, command):
    out = {"info": (), "convert": (tmp_path / "o.jsonl",), "compose": ("-o", tmp_path / "o.jsonl")}[command]
    assert call(command, data / "mooncake.jsonl", *out, "--seed", -1).exit_code == 2


def test_what_is_no_file_is_said(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    for file, says in ((tmp_path, "is a folder"), ("/dev/null", "is a device"), (empty, "the file is empty")):
        for command in (
            ("info", file),
            ("convert", file, tmp_path / "o.jsonl"),
            ("compose", file, "-o", tmp_path / "o.jsonl"),
        ):
            assert says in error_of(*command)


@pytest.mark.parametrize("page", ["none/page.html", "folder"])
def test_the_page_is_checked_before_the_work(tmp_path, page):
    (tmp_path / "folder").mkdir()
    bad = tmp_path / "bad.jsonl"
    bad.write_text("nonsense")
    shown = call("info", bad, "--html", tmp_path / page)
    assert shown.exit_code != 0
    assert "folder" in shown.stderr + str(shown.exception)
    assert "format" not in str(shown.exception)


@pytest.mark.parametrize("args", [("--window", "5"), ("--sizes", "0"), ()])
def test_wrong_usage(args, tmp_path):
    command = "info" if "--sizes" in args else "compose"
    more = ("x",) if args else ()
    out = () if command == "info" else ("-o", str(tmp_path / "o.jsonl"))
    assert call(command, *more, *args, *out).exit_code == 2


def test_traces_need_no_torch():
    modules = "readers, files, spec, summary, reblock"
    code = f"import sys; from kvpilot.env.traces import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=60, check=False).returncode == 0
