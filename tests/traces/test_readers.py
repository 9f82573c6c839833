import gzip
import io
import json
import lzma
import tarfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.env.traces.files import write_trace
from kvpilot.env.traces.readers import ReadOptions, read_trace
from kvpilot.env.traces.servegen import RateCurve, generate, read_length_series, read_rate_curve
from kvpilot.env.traces.trace import COLUMNS, TraceError


def equal(a, b) -> bool:
    columns = all(
        np.array_equal(getattr(a, n), getattr(b, n), equal_nan=n == "think_seconds") for n in COLUMNS
    )
    return columns and a.block_size == b.block_size


def archive(files: dict[str, bytes]) -> bytes:
    target = io.BytesIO()
    with tarfile.open(fileobj=target, mode="w:xz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return target.getvalue()


# ---------------------------------------------------------------------- each format
def test_mooncake(data):
    trace = read_trace(data / "mooncake.jsonl")
    assert trace.arrival_seconds.tolist() == [0.0, 0.027, 4.5]
    assert trace.prompt_tokens.tolist() == [1100, 700, 1600]
    assert trace.output_tokens.tolist() == [50, 9, 20]
    assert [trace.blocks_of(i).tolist() for i in range(3)] == [[0, 1], [0], [0, 1, 4]]  # no partial block
    assert trace.block_size == 512
    assert trace.session.tolist() == [0, 0, 0]
    assert trace.turn.tolist() == [1, 2, 2]  # the third goes on from the first
    assert trace.provenance[0]["format"] == "mooncake"
    assert len(trace.provenance[0]["sha256"]) == 64


def test_ticks_are_spread_and_keep_the_order(tmp_path):
    lines = [
        {"timestamp": 3000 * (k // 4), "input_length": 600 + k, "output_length": 1, "hash_ids": [0, k + 1]}
        for k in range(12)
    ]
    (tmp_path / "a").write_text("\n".join(map(json.dumps, lines)))
    trace = read_trace(tmp_path / "a", options=ReadOptions(seed=5))
    assert trace.prompt_tokens.tolist() == list(range(600, 612))
    assert (trace.arrival_seconds // 3).tolist() == [k // 4 for k in range(12)]
    assert len(set(trace.arrival_seconds.tolist())) == 12
    assert trace.provenance[-1] == {"step": "jitter", "tick_seconds": 3.0, "seed": 5}
    again = read_trace(tmp_path / "a", options=ReadOptions(seed=5))
    assert equal(trace, again)
    assert not equal(trace, read_trace(tmp_path / "a", options=ReadOptions(seed=6)))


def test_azure(data):
    trace = read_trace(data / "azure.csv", options=ReadOptions(block_size=64))
    assert trace.arrival_seconds.tolist() == [0.0, 1.5]
    assert trace.prompt_tokens.tolist() == [130, 64]
    assert trace.block_ids.tolist() == [0, 1, 2]  # nothing shared
    assert trace.session.tolist() == [0, 1]


def test_agentic_session(data):
    trace = read_trace(data / "session.json")
    assert trace.arrival_seconds.tolist() == [0.0, 6.0, 9.0]  # the sub-agent's times count from its own start
    assert trace.prompt_tokens.tolist() == [130, 70, 200]
    assert trace.output_tokens.tolist() == [40, 1, 10]
    assert [trace.blocks_of(i).tolist() for i in range(3)] == [[1, 2], [9], [1, 2, 3]]
    assert trace.turn.tolist() == [1, 2, 3]
    assert trace.think_seconds[1:].tolist() == [1.0, 2.0]  # recorded; else since the last one's end at 6 + 1
    assert trace.closed_loop


def test_agentic_archive(data, tmp_path):
    session = (data / "session.json").read_bytes()
    (tmp_path / "a.tar.xz").write_bytes(archive({f"{k}.json": session for k in range(40)}))
    options = ReadOptions(sessions_per_second=0.1, seed=3)
    trace = read_trace(tmp_path / "a.tar.xz", options=options)
    assert len(trace) == 120
    starts = np.sort([trace.arrival_seconds[trace.session == k].min() for k in range(40)])
    assert 200 < starts[-1] < 800  # 40 sessions at one in ten seconds
    for k in range(40):
        rows = trace.session == k
        assert np.diff(trace.arrival_seconds[rows]) == pytest.approx([6.0, 3.0])
        mine = set(np.repeat(rows, trace.num_full_blocks).nonzero()[0])
        ids = {int(trace.block_ids[i]) for i in mine}
        assert len(ids) == 4
        others = np.delete(trace.block_ids, list(mine))
        assert ids.isdisjoint(others.tolist())  # ids are local to a session
    assert equal(trace, read_trace(tmp_path / "a.tar.xz", options=options))


def test_own_lines_in_any_order_without_sessions(data):
    trace = read_trace(data / "own.jsonl")
    assert trace.arrival_seconds.tolist() == [0.5, 2.5]
    assert trace.block_ids.tolist() == [7, 7, 8]
    assert trace.session.tolist() == [0, 0]
    assert trace.turn.tolist() == [1, 2]
    assert trace.provenance[0] == {"step": "made up"}


def test_wall_clock_times_count_from_the_first(tmp_path):
    line = {"prompt_tokens": 1, "output_tokens": 1, "block_size": 4, "blocks": []}
    lines = [json.dumps({"arrival": 1.8e9 + k, **line}) for k in (3, 1)]
    (tmp_path / "a").write_text("\n".join(lines))
    trace = read_trace(tmp_path / "a")
    assert trace.arrival_seconds.tolist() == [0.0, 2.0]
    assert trace.provenance[-1]["unix_start"] == 1.8e9 + 1


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.xz", "a.parquet"])
@given(seed=st.integers(0, 1000))
def test_round_trip(talk, tmp_path_factory, name, seed):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    trace = talk(seed).trace(4).noting(step="made up", seed=seed)
    think = np.where(trace.turn > 1, trace.arrival_seconds / 3, np.nan)
    trace = trace.replace(
        think_seconds=think, tenant=trace.session + 1, block_ids=trace.block_ids + (1 << 62)
    )
    path = tmp_path_factory.mktemp("round") / name
    write_trace(trace, path)
    back = read_trace(path)
    assert equal(trace, back)
    assert back.provenance[0] == {"step": "made up", "seed": seed}
    assert back.provenance[-1]["file"] == name
    assert [file.name for file in path.parent.iterdir()] == [name]


def test_servegen(data):
    curve = read_rate_curve(data / "rates.csv")
    assert curve.rates.tolist() == [1.0, 3.0, 0.0]
    assert curve.end_seconds == 1800.0
    assert curve.mean_rate == pytest.approx(4 / 3)
    lengths = read_length_series(data / "lengths.json")
    assert [window.start_seconds for window in lengths] == [0.0, 21600.0]
    assert lengths[1].output_weights.tolist() == [0.25, 0.75]
    trace = generate(curve, lengths, seed=1, block_size=8)
    assert 2000 < len(trace) < 2800
    assert trace.arrival_seconds[-1] < 1200  # the last window is silent
    early = trace.arrival_seconds < 600
    assert 2.5 < (~early).sum() / early.sum() < 3.5
    assert set(trace.prompt_tokens[early].tolist()) == {10, 20}
    assert set(trace.prompt_tokens[trace.arrival_seconds >= 900].tolist()) == {100}
    assert len(np.unique(trace.block_ids)) == len(trace.block_ids)
    assert equal(trace, generate(curve, lengths, seed=1, block_size=8))


def test_servegen_archives_sum_the_clients_asked_for(data, tmp_path):
    rates = (data / "rates.csv").read_bytes()
    names = ("language/m-large/chunk-0-trace.csv", "language/m-large/chunk-1-trace.csv", "reason/x-trace.csv")
    (tmp_path / "r").write_bytes(archive(dict.fromkeys(names, rates)))
    assert read_rate_curve(tmp_path / "r", "language/").rates.tolist() == [2.0, 6.0, 0.0]
    with pytest.raises(TraceError, match="0 windows of clients 'video'"):
        read_rate_curve(tmp_path / "r", "video")


@pytest.mark.parametrize("name", ["rates.csv", "lengths.json"])
def test_series_are_not_traces(data, name):
    with pytest.raises(TraceError, match="is not a trace but"):
        read_trace(data / name)


def test_a_curve_from_a_trace(data):
    curve = RateCurve.of_trace(read_trace(data / "mooncake.jsonl"), 1.0)
    assert curve.rates.tolist() == [2.0, 0.0, 0.0, 0.0, 1.0]


# ---------------------------------------------------------------------- compression, damage
@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
@pytest.mark.parametrize("name", ["mooncake.jsonl", "azure.csv", "own.jsonl", "session.json"])
def test_compression_is_known_by_content(data, tmp_path, compress, name):
    (tmp_path / "without-suffix").write_bytes(compress((data / name).read_bytes()))
    assert equal(read_trace(tmp_path / "without-suffix"), read_trace(data / name))


def long_mooncake() -> bytes:
    rng = np.random.default_rng(0)
    lines = []
    for k in range(4000):
        lengths = rng.integers(1, 500, 2).tolist()
        record = {
            "timestamp": 7 * k,
            "input_length": lengths[0],
            "output_length": lengths[1],
            "hash_ids": [k],
        }
        lines.append(json.dumps(record))
    return "\n".join(lines).encode()


@pytest.mark.parametrize("compress", [gzip.compress, lzma.compress])
def test_a_truncated_file_is_an_error_or_one_bad_record(tmp_path, compress):
    path, content = tmp_path / "a", long_mooncake()
    packed = compress(content)
    path.write_bytes(packed[: len(packed) * 3 // 4])
    with pytest.raises(TraceError, match=r"a: line \d+: the compressed data is truncated or damaged"):
        read_trace(path)
    trace = read_trace(path, skip_bad=True)
    assert 1000 < len(trace) < 4000
    assert trace.provenance[0]["skipped"] == 1


def test_a_truncated_plain_file_names_the_last_line(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(long_mooncake()[:-20])
    with pytest.raises(TraceError, match=r"a: line 4000: not JSON"):
        read_trace(path)
    assert len(read_trace(path, skip_bad=True)) == 3999


def test_a_truncated_archive(data, tmp_path):
    files = {f"{k}.json": json.dumps(long_session(k)).encode() for k in range(50)}
    packed = archive(files)
    (tmp_path / "a").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(TraceError, match="a: archive: truncated or damaged"):
        read_trace(tmp_path / "a")
    trace = read_trace(tmp_path / "a", skip_bad=True)
    assert 0 < len(trace) < 50
    assert trace.provenance[0]["skipped"] == 1


def long_session(seed: int) -> dict:
    text = np.random.default_rng(seed).bytes(3000).hex()
    request = {"t": 0, "in": 64, "out": 1, "hash_ids": [1]}
    return {"block_size": 64, "requests": [request], "note": text}


def test_a_damaged_parquet_file(talk, tmp_path):
    pytest.importorskip("pyarrow")
    write_trace(talk(1).trace(4), tmp_path / "a.parquet")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "b").write_bytes(content[: len(content) // 2])
    with pytest.raises(TraceError, match="b: not a readable Parquet file"):
        read_trace(tmp_path / "b")


# ---------------------------------------------------------------------- malformed records
GOOD = {"timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}
OWN = {"arrival": 1, "prompt_tokens": 9, "output_tokens": 1, "block_size": 4, "blocks": [1, 2]}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"timestamp" 1}', "line 3: not JSON (Expecting ':' delimiter at character 14)"),
        ("[1]", "line 3: [1] is not a JSON object"),
        ({"timestamp": "x"}, "line 3: field timestamp='x' is invalid: expected a number >= 0"),
        ({"timestamp": -1}, "line 3: field timestamp=-1 is invalid: expected a number >= 0"),
        ({"input_length": 6.5}, "line 3: field input_length=6.5 is invalid: expected an integer >= 1 of 63 bits"),
        ({"output_length": None}, "line 3: field output_length=None is invalid: expected an integer >= 1 of 63 bits"),
        ({"output_length": True}, "line 3: field output_length=True is invalid: expected an integer >= 1 of 63 bits"),
        ({"hash_ids": [0]}, "line 3: field hash_ids has 1 ids: expected 2 for input_length=600"),
        ({"hash_ids": [0, -1]}, "line 3: field hash_ids=[0, -1] is invalid: expected a list of integers in [0, 2^63)"),
        ({"hash_ids": "ab"}, "line 3: field hash_ids='ab' is invalid: expected a list of integers in [0, 2^63)"),
        (
            {"input_length": 1100, "hash_ids": [7, 0, 1]},
            "line 3: field blocks: id 0 follows other blocks than before: expected chained ids "
            "(equal id, equal prompt up to there)",
        ),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named_or_counted(tmp_path, line, message):
    bad = line if isinstance(line, str) else json.dumps(GOOD | line)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join([json.dumps(GOOD), "", bad, json.dumps(GOOD)]))
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value) == f"{path}: {message}"
    trace = read_trace(path, skip_bad=True)
    assert len(trace) == 2
    assert trace.provenance[0]["skipped"] == 1
    assert trace.provenance[0]["first_skipped"] == f"{path}: {message}"


def test_endless_nesting_is_a_bad_line(tmp_path):
    (tmp_path / "t").write_text("[" * 100_000)
    with pytest.raises(TraceError, match="line 1: not JSON"):
        read_trace(tmp_path / "t", "mooncake")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": [1]}, "line 2: 1 blocks are invalid: expected 2 of 4 tokens in a prompt of 9"),
        ({"block_size": 8}, "line 2: field block_size=8 is invalid: expected 4 as before"),
        ({"session": -3}, "line 2: field session=-3 is invalid: expected an integer >= 0"),
        (
            {"turn": 1 << 40},
            "line 2: field turn=1099511627776 is invalid: expected an integer >= 1 of 31 bits",
        ),
        ({"think": "long"}, "line 2: field think='long' is invalid: expected a number >= 0"),
        ({"kvpilot_trace": 2}, "line 2: field kvpilot_trace=2: expected version 1"),
        ({"blocks": [1, 1 << 63]}, "line 2: field blocks=[1, 9223372036854775808] is invalid"),
    ],
)
def test_a_malformed_line_of_ours(tmp_path, change, message):
    path = tmp_path / "t"
    path.write_text(json.dumps(OWN) + "\n" + json.dumps(OWN | change) + "\n")
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert len(read_trace(path, skip_bad=True)) == 1


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("yesterday,5,5", "line 3: field TIMESTAMP='yesterday' is invalid: expected a date and time"),
        ("2023-11-16 18:00:00,5,0", "line 3: field GeneratedTokens='0' is invalid: expected an integer >= 1"),
        ("2023-11-16 18:00:00,5", "line 3: 2 columns: expected TIMESTAMP,ContextTokens,GeneratedTokens"),
    ],
)
def test_a_malformed_row(data, tmp_path, row, message):
    lines = (data / "azure.csv").read_text().splitlines()
    path = tmp_path / "t"
    path.write_text("\n".join([*lines[:2], row, lines[2]]))
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value) == f"{path}: {message}"
    assert len(read_trace(path, skip_bad=True)) == 2


@pytest.mark.parametrize(
    ("edit", "place", "left"),
    [
        (lambda s: s["requests"][0].pop("in"), "s.json: request 1: field in is missing", 2),
        (lambda s: s["requests"][1].pop("t"), "s.json: request 2: field t is missing", 2),
        (
            lambda s: s["requests"][1]["requests"].append(5),
            "s.json: request 2, request 2: 5 is not a JSON",
            3,
        ),
        (lambda s: s["requests"][2].update(think_time=-1), "s.json: request 3: field think_time=-1", 2),
        (lambda s: s["requests"][2].update(hash_ids=[1]), "s.json: request 3: 1 blocks are invalid", 2),
        (lambda s: s.update(block_size=0), "s.json: field block_size=0 is invalid", 0),
        (lambda s: s.update(requests=5), "s.json: field requests=5 is invalid: expected a list", 0),
    ],
)
def test_a_malformed_session(data, tmp_path, edit, place, left):
    session = json.loads((data / "session.json").read_text())
    edit(session)
    path = tmp_path / "s"
    good = (data / "session.json").read_bytes()
    path.write_bytes(archive({"s.json": json.dumps(session).encode(), "good.json": good}))
    with pytest.raises(TraceError) as error:
        read_trace(path)
    assert str(error.value).startswith(f"{path}: {place}")
    trace = read_trace(path, skip_bad=True)
    assert len(trace) == left + 3
    assert trace.provenance[0]["skipped"] == 1


@pytest.mark.parametrize(
    ("content", "file_format", "message"),
    [
        ("what is this?\n", "auto", "line 1: cannot tell the format of 'what is this?'"),
        ('{"a": 1}\n', "auto", "line 1: cannot tell the format"),
        ("", "auto", "the file is empty"),
        ("", "mooncake", "no request in it"),
        ("{}\n", "csv", "format='csv' is invalid: expected auto, mooncake"),
    ],
)
def test_what_cannot_be_a_trace(tmp_path, content, file_format, message):
    (tmp_path / "t").write_text(content)
    with pytest.raises(TraceError) as error:
        read_trace(tmp_path / "t", file_format)
    assert message in str(error.value)


def test_nothing_left_says_what_was_skipped(tmp_path):
    (tmp_path / "t").write_text("x\ny\n")
    with pytest.raises(TraceError, match=r"no request in it \(2 bad ones skipped\)"):
        read_trace(tmp_path / "t", "mooncake", skip_bad=True)


def test_no_such_file(tmp_path):
    with pytest.raises(TraceError, match="nothing: no such file"):
        read_trace(tmp_path / "nothing")


@given(noise=st.binary(max_size=300), at=st.integers(0, 2000))
def test_noise_is_a_trace_error_or_a_trace(data, tmp_path_factory, noise, at):
    """Never anything else, whatever is in the file."""
    path = tmp_path_factory.mktemp("noise") / "t"
    content = (data / "mooncake.jsonl").read_bytes()
    path.write_bytes(content[: at % len(content)] + noise + content[at % len(content) :])
    for skip_bad in (False, True):
        for file_format in ("auto", "mooncake"):
            try:
                trace = read_trace(path, file_format, skip_bad=skip_bad)
            except TraceError:
                continue
            assert len(trace) >= 1


@pytest.mark.parametrize("name", ["t.txt", "t.json", "t.jsonl.zip", "nowhere/t.jsonl"])
def test_writing_needs_a_known_name(data, tmp_path, name):
    with pytest.raises(TraceError, match="output="):
        write_trace(read_trace(data / "azure.csv"), tmp_path / name)
