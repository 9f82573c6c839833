import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvpilot.env.traces import compose
from kvpilot.env.traces.files import write_trace
from kvpilot.env.traces.reuse import find_runs, infinite_hit_rate
from kvpilot.env.traces.servegen import RateCurve
from kvpilot.env.traces.spec import load_spec, run_spec
from kvpilot.env.traces.trace import COLUMNS, TraceError

SEEDS = st.integers(0, 1000)
DAY = RateCurve(
    start_seconds=np.array([0.0, 100.0, 200.0]), rates=np.array([1.0, 0.0, 5.0]), end_seconds=300.0
)


def shape(trace, session) -> list[tuple]:
    """Of a session: when its requests come after its first, and how long they are."""
    rows = np.flatnonzero(trace.session == session)
    times = np.round(trace.arrival_seconds[rows] - trace.arrival_seconds[rows[0]], 6)
    return list(zip(times.tolist(), trace.prompt_tokens[rows], trace.output_tokens[rows], strict=True))


def shapes(trace) -> list[list[tuple]]:
    return sorted(shape(trace, session) for session in np.unique(trace.session))


def same(a, b) -> bool:
    return all(np.array_equal(getattr(a, n), getattr(b, n), equal_nan=n == "think_seconds") for n in COLUMNS)


@given(seed=SEEDS, fraction=st.floats(0.05, 1))
def test_a_sample_has_whole_sessions(talk, seed, fraction):
    trace = talk(seed, num_sessions=20).trace(4)
    sample = compose.sample_sessions(trace, fraction, seed=seed)
    sessions = np.unique(sample.session)
    assert len(sessions) == max(1, round(20 * fraction))
    assert all(shape(sample, session) == shape(trace, session) for session in sessions)
    assert same(sample, compose.sample_sessions(trace, fraction, seed=seed))
    assert sample.provenance[-1] == {"step": "sample_sessions", "fraction": fraction, "seed": seed}


@given(seed=SEEDS, factor=st.sampled_from([0.25, 0.5, 1.0, 2.0, 2.5, 3.0]))
def test_scaling_multiplies_sessions_and_stretches_none(talk, seed, factor):
    trace = talk(seed, num_sessions=20).trace(4)
    scaled = compose.scale_arrivals(trace, factor, seed=seed, jitter_seconds=5.0)
    assert len(np.unique(scaled.session)) == 20 * factor
    assert {str(s) for s in shapes(scaled)} <= {str(s) for s in shapes(trace)}
    assert scaled.arrival_seconds[-1] <= trace.arrival_seconds[-1] + 5.0
    assert same(scaled, compose.scale_arrivals(trace, factor, seed=seed, jitter_seconds=5.0))
    if factor > 1:
        other = compose.scale_arrivals(trace, factor, seed=seed + 1, jitter_seconds=5.0)
        assert not np.array_equal(scaled.arrival_seconds, other.arrival_seconds)


@given(seed=SEEDS)
def test_copies_share_the_system_prompt_and_nothing_else(talk, seed):
    trace = talk(seed, num_sessions=8, preamble=8).trace(4)
    doubled = compose.scale_arrivals(trace, 2.0, seed=seed)
    in_sessions = {}
    for i in range(len(doubled)):
        for block in doubled.blocks_of(i).tolist():
            in_sessions.setdefault(block, set()).add(int(doubled.session[i]))
    shared = {block for block, sessions in in_sessions.items() if len(sessions) > 1}
    assert shared == set(trace.blocks_of(0)[:2].tolist())
    private = len(np.unique(trace.block_ids)) - 2
    assert len(np.unique(doubled.block_ids)) == 2 + 2 * private


@given(seed=SEEDS)
def test_modulation_moves_sessions_whole_and_follows_the_curve(talk, seed):
    trace = talk(seed, num_sessions=200, max_turns=2).trace(4)
    moved = compose.modulate(trace, DAY, seed=seed)
    assert shapes(moved) == shapes(trace)
    first, _ = compose.session_starts(moved)
    counts = np.histogram(first, [0, 100, 200, 300.001])[0]
    assert counts[1] == 0
    assert counts[2] > 3 * counts[0]
    old = compose.session_starts(trace)[0]
    assert np.array_equal(np.argsort(old), np.argsort(first))
    assert same(moved, compose.modulate(trace, DAY, seed=seed))
    assert compose.session_starts(compose.modulate(trace, DAY, seed=seed, seconds=30.0))[0].max() <= 30.0


@given(seed=SEEDS)
def test_a_mixture_is_its_parts_side_by_side(talk, seed):
    a, b = talk(seed).trace(4), talk(seed + 1).trace(4)
    b = b.replace(tenant=b.session % 2)
    both = compose.mix([a, b])
    assert shapes(both) == sorted(shapes(a) + shapes(b))
    sums = [infinite_hit_rate(t, find_runs(t)) * len(t.block_ids) for t in (a, b, both)]
    assert sums[2] == pytest.approx(sums[0] + sums[1])
    tenants = [set(both.tenant[np.isin(both.session, part)]) for part in (range(6), range(6, 12))]
    assert tenants[0] == {0}
    assert tenants[1] == {1 + x for x in set(b.tenant.tolist())}


@given(seed=SEEDS)
def test_a_switch_cuts(talk, seed):
    a, b = talk(seed, num_sessions=30).trace(4), talk(seed + 1, num_sessions=30).trace(4)
    result = compose.switch([a, b], [20.0])
    num = int((a.arrival_seconds < 20).sum())
    assert np.array_equal(result.arrival_seconds[:num], a.arrival_seconds[:num])
    assert result.arrival_seconds[num:] == pytest.approx(b.arrival_seconds + 20)
    assert set(result.block_ids[: result.block_offsets[num]]).isdisjoint(
        result.block_ids[result.block_offsets[num] :]
    )


def test_one_after_the_other(talk):
    a, b = talk(1).trace(4), talk(2).trace(4)
    result = compose.concatenate([a, b])
    assert result.arrival_seconds[len(a) :] == pytest.approx(b.arrival_seconds + a.arrival_seconds[-1])
    assert [len(source) for source in result.provenance[0]["sources"]] == [0, 0]


def test_a_window_starts_at_zero(talk):
    trace = talk(1, num_sessions=30).trace(4)
    part = compose.window(trace, 10, 30)
    inside = (trace.arrival_seconds >= 10) & (trace.arrival_seconds < 30)
    assert part.arrival_seconds == pytest.approx(trace.arrival_seconds[inside] - 10)
    assert part.prompt_tokens.tolist() == trace.prompt_tokens[inside].tolist()
    with pytest.raises(TraceError, match=r"window=\[1000, 2000\) is invalid"):
        compose.window(trace, 1000, 2000)


def test_lengths_are_cut(talk):
    trace = talk(1).trace(4)
    cut = compose.clip_lengths(trace, max_prompt_tokens=30, max_output_tokens=3)
    assert cut.prompt_tokens.tolist() == np.minimum(trace.prompt_tokens, 30).tolist()
    assert cut.output_tokens.max() == 3
    for i in range(len(cut)):
        assert cut.blocks_of(i).tolist() == trace.blocks_of(i)[: len(cut.blocks_of(i))].tolist()
    dropped = compose.drop_longer(trace, 40)
    assert (dropped.prompt_tokens + dropped.output_tokens).max() <= 40
    assert dropped.provenance[-1]["dropped"] == len(trace) - len(dropped) > 0


@given(seed=SEEDS, divisor=st.sampled_from([2, 4]))
def test_shrinking_keeps_blocks_and_times(talk, seed, divisor):
    trace = talk(seed).trace(4)
    small = compose.shrink(trace, divisor)
    assert small.block_ids.tolist() == trace.block_ids.tolist()
    assert small.arrival_seconds.tolist() == trace.arrival_seconds.tolist()
    assert small.block_size == 4 // divisor
    assert small.prompt_tokens.tolist() == np.maximum(trace.prompt_tokens // divisor, 1).tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda t: compose.sample_sessions(t, 0.0, seed=0), "fraction=0.0 is invalid"),
        (lambda t: compose.scale_arrivals(t, -1, seed=0), "factor=-1 is invalid"),
        (lambda t: compose.modulate(t, DAY, seed=0, seconds=0), "seconds=0 is invalid"),
        (lambda t: compose.switch([t, t], [5, 4]), r"at_seconds=\[5, 4\] is invalid"),
        (lambda t: compose.switch([t, t], [0]), r"at_seconds=\[0\] is invalid"),
        (lambda t: compose.mix([t, t.with_block_size(8)]), r"block_size differs: \[4, 8\]"),
        (lambda t: compose.mix([]), "no trace to compose"),
        (lambda t: compose.shrink(t, 3), "divisor=3 is invalid"),
        (lambda t: compose.drop_longer(t, 1), "max_tokens=1 is invalid"),
        (lambda t: compose.clip_lengths(t, max_prompt_tokens=0), "max_prompt_tokens=0 is invalid"),
    ],
)
def test_wrong_parameters_are_named(talk, call, message):
    with pytest.raises(TraceError, match=message):
        call(talk(1).trace(4))


# ---------------------------------------------------------------------- spec files
def write_spec(folder, text: str):
    (folder / "spec.toml").write_text(text)
    return folder / "spec.toml"


def test_a_spec_is_carried_out_step_by_step(talk, tmp_path):
    a, b = talk(1, num_sessions=30).trace(4), talk(2, num_sessions=30).trace(8)
    write_trace(a, tmp_path / "a.jsonl")
    write_trace(b, tmp_path / "b.jsonl.gz")
    spec = write_spec(
        tmp_path,
        """
        seed = 3
        combine = "switch"
        switch_seconds = [25]
        [[sources]]
        file = "a.jsonl"
        sample = 0.5
        block_size = 8
        [[sources]]
        file = "b.jsonl.gz"
        scale = 2.0
        curve = { file = "a.jsonl", window_seconds = 10, seconds = 60 }
        """,
    )
    result = run_spec(load_spec(spec))
    first = compose.sample_sessions(a.with_block_size(8), 0.5, seed=3)
    curve = RateCurve.of_trace(a, 10.0).lasting(60)
    second = compose.modulate(compose.scale_arrivals(b, 2.0, seed=4), curve, seed=4)
    assert same(result, compose.switch([first, second], [25.0]))
    sources = result.provenance[0]["sources"]
    assert [step["step"] for step in sources[0]] == ["read", "with_block_size", "sample_sessions"]
    assert [step["step"] for step in sources[1]] == ["read", "scale_arrivals", "modulate"]
    assert len(sources[1][0]["sha256"]) == 64
    json.dumps(result.provenance)


def test_traffic_is_generated_from_rates_and_lengths(data, tmp_path):
    spec = write_spec(
        tmp_path,
        f"""
        [[sources]]
        file = "{data / "lengths.json"}"
        format = "servegen-lengths"
        curve = {{ file = "{data / "rates.csv"}" }}
        requests = 50
        """,
    )
    assert len(run_spec(load_spec(spec))) == 50


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed = ", "spec.toml cannot be read: it is not TOML"),
        ("seed = 1", "sources is empty"),
        ("speed = 1\n[[sources]]\nfile='a'", "speed=1 is invalid: expected one of sources"),
        ("[[sources]]\nfile='a'\nsampel=0.5", "source 1: sampel=0.5 is invalid: expected one of file"),
        ("[[sources]]\nsample=0.5", "source 1: file=None is invalid: expected a path"),
        ("[[sources]]\nfile='a'\nsample='half'", "source 1: sample='half' is invalid: expected float"),
        ("[[sources]]\nfile='a'\nshrink=true", "source 1: shrink=True is invalid: expected int"),
        (
            "[[sources]]\nfile='a'\nwindow=[1]",
            "source 1: window=[1] is invalid: expected a list of 2 float",
        ),
        ("[[sources]]\nfile='a'\ncurve={client='x'}", "source 1, curve: file=None is invalid"),
        ("combine='blend'\n[[sources]]\nfile='a'", "combine='blend' is invalid"),
        ("combine='switch'\n[[sources]]\nfile='a'", "switch_seconds=[] and combine='switch' disagree"),
        ("sources = 5", "sources is invalid: expected [[sources]] tables"),
    ],
)
def test_a_wrong_spec_is_named(tmp_path, text, message):
    with pytest.raises(TraceError) as error:
        load_spec(write_spec(tmp_path, text))
    assert message in str(error.value)
