"""Traffic: schedules, splits, and who sends what when."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kvpilot.engine.errors import ConfigError
from kvpilot.env.traces.trace import TraceError
from kvpilot.env.tuning.schedule import draw_times, level_at, merged
from kvpilot.env.tuning.sessions import SPLITS, load_table
from kvpilot.env.tuning.traffic import Stream


def run_to_end(episode):
    session = episode.start()
    while not session.is_done:
        session.advance(episode.interval_seconds)
    return session.simulation


def most_at_once(requests, start, stop):
    """The largest number of requests between arrival and answer, of those that arrive in [start, stop)."""
    chosen = [r for r in requests if start <= r.arrival_time < stop]
    marks = sorted([(r.arrival_time, 1) for r in chosen] + [(r.finish_time, -1) for r in chosen])
    return int(np.cumsum([step for _, step in marks]).max())


def stream(loop, *level, file="sessions.jsonl"):
    return Stream(file=file, loop=loop, level=level)


# ---------------------------------------------------------------------- schedules
def test_times_follow_the_level():
    schedule = ((0.0, 2.0), (100.0, 0.0), (200.0, 6.0), (300.0, 1.0))
    times = draw_times(schedule, 400.0, np.random.default_rng(1))
    counts, _ = np.histogram(times, bins=[0, 100, 200, 300, 400])
    assert counts[1] == 0
    assert counts == pytest.approx([200, 0, 600, 100], abs=60)
    assert (np.diff(times) >= 0).all()


def test_no_times_where_nothing_comes():
    assert len(draw_times(((0.0, 0.0),), 100.0, np.random.default_rng(1))) == 0


def test_levels_multiply():
    product = merged([((0.0, 2.0), (10.0, 4.0)), ((0.0, 1.0), (5.0, 3.0))])
    assert product == ((0.0, 2.0), (5.0, 6.0), (10.0, 12.0))
    assert [level_at(product, second) for second in (0.0, 4.9, 5.0, 99.0)] == [2.0, 2.0, 6.0, 12.0]


@pytest.mark.parametrize(
    "level", [(), ((1.0, 2.0),), ((0.0, 1.0), (0.0, 2.0)), ((0.0, -1.0),), ((0.0, np.nan),)]
)
def test_a_level_that_is_none_is_refused(level):
    with pytest.raises(ConfigError, match=r"level of sessions.jsonl"):
        stream("open", *level)


def test_a_loop_that_is_none_is_refused():
    with pytest.raises(ConfigError, match=r"loop='round'.*closed, open, one-off"):
        stream("round", (0.0, 1.0))


# ---------------------------------------------------------------------- splits
def table_of(episode):
    return episode.tables()[0]


def test_no_session_is_in_two_splits_and_none_is_lost(episode):
    table = table_of(episode)
    parts = {split: {rows[0] for rows in table.sessions(split)} for split in SPLITS}
    assert sum(map(len, parts.values())) == 100
    assert len(set.union(*parts.values())) == 100
    assert len(parts["train"]) > len(parts["test"]) > 8
    sessions = {split: {int(table.trace.session[row]) for row in rows} for split, rows in parts.items()}
    assert not sessions["train"] & sessions["test"]
    assert not sessions["validation"] & (sessions["train"] | sessions["test"])


def test_a_split_does_not_depend_on_the_page_size(episode):
    coarse = replace(episode, page_size=16, pool_bytes=2 * episode.pool_bytes)
    first = [[len(rows) for rows in table_of(e).sessions("test")] for e in (episode, coarse)]
    assert first[0] == first[1]


def test_a_short_trace_cannot_be_split(tmp_path, make_sessions, write_trace):
    write_trace(make_sessions(20), tmp_path / "short.jsonl")
    table = load_table(tmp_path, "short.jsonl", page_size=8, max_tokens=1000)
    with pytest.raises(
        TraceError, match=r"short.jsonl: too short to split: \d of its 20 sessions are in test"
    ):
        table.sessions("test")


def test_what_is_missing_is_named(episode, tmp_path):
    with pytest.raises(TraceError, match="there is no such folder"):
        replace(episode, folder=str(tmp_path / "none")).start()
    with pytest.raises(TraceError, match=r"sessions.jsonl: no such file"):
        replace(episode, folder=str(tmp_path)).start()
    with pytest.raises(ConfigError, match="split='dev' is invalid: expected train, validation, test"):
        replace(episode, split="dev").start()


def test_the_cache_gives_what_the_file_gives(episode, cache):
    from kvpilot.env.tuning import sessions

    sessions._load.cache_clear()
    read = table_of(episode)
    assert list((cache / "paged").glob("*.parquet"))
    sessions._load.cache_clear()
    kept = table_of(episode)
    assert kept is not read
    assert kept.digest == read.digest
    for name in ("block_ids", "block_offsets", "session", "think_seconds"):
        np.testing.assert_array_equal(getattr(kept.trace, name), getattr(read.trace, name))


def test_copies_share_what_sessions_share_and_nothing_else(episode):
    table = table_of(episode)
    row = table.sessions("train")[0][-1]
    first, again, copy = (table.blocks(row, stream=1, copy=c, serial=s) for c, s in ((0, 1), (0, 2), (3, 3)))
    num_known = int(table.trace.num_full_blocks[row])
    assert first[:num_known] == again[:num_known]
    assert copy[0] == first[0], "the preamble that all sessions have"
    assert not set(copy[1:]) & set(first)
    ends = [set(blocks[num_known:]) for blocks in (first, again, copy)]
    assert not (ends[0] & ends[1]) | (ends[0] & ends[2])
    assert not set(first) & set(table.blocks(row, stream=2, copy=0, serial=4))


# ---------------------------------------------------------------------- closed loop
def closed(episode, *level, **changes):
    return replace(episode, streams=(stream("closed", *level),), **changes)


def test_users_take_turns_and_think(episode):
    """Two users: never more than two requests at a time, each later turn a think time (2 s) after the answer."""
    simulation = run_to_end(closed(episode, (0.0, 2.0)))
    requests = sorted(simulation.finished, key=lambda r: r.arrival_time)
    assert len(requests) > 50
    assert most_at_once(requests, 0, 200) == 2
    ends = {round(r.finish_time, 9) for r in requests}
    starts = [round(r.arrival_time, 9) for r in requests[4:]]
    next_turns = [round(at - 2.0, 9) in ends for at in starts]
    new_sessions = [at in ends for at in starts]
    assert all(turn or new for turn, new in zip(next_turns, new_sessions, strict=True))
    assert 0 < sum(new_sessions) < sum(next_turns)


def test_users_come_and_go_with_the_level(episode):
    many = closed(episode, (0.0, 1.0), (50.0, 14.0), (100.0, 1.0), seconds=150.0)
    requests = run_to_end(many).finished
    assert most_at_once(requests, 30, 50) == 1
    assert most_at_once(requests, 110, 180) == 1
    assert 3 < most_at_once(requests, 80, 100) <= 14


def test_a_level_of_no_users_ends_the_traffic(episode):
    simulation = run_to_end(closed(episode, (0.0, 3.0), (60.0, 0.0)))
    assert max(r.arrival_time for r in simulation.finished) <= 60.0
    assert not simulation.engine.has_work()


def test_without_think_times_the_loop_stays_open(tmp_path, episode, make_sessions, write_trace):
    trace = make_sessions(100)
    write_trace(trace.replace(think_seconds=np.full(len(trace), np.nan)), tmp_path / "sessions.jsonl")
    with pytest.raises(TraceError, match="has no think times"):
        closed(episode, (0.0, 2.0), folder=str(tmp_path)).start()


# ---------------------------------------------------------------------- open loop
def test_open_sessions_keep_their_recorded_gaps(episode):
    quiet = replace(episode, streams=(stream("open", (0.0, 0.05)),), warmup_seconds=10.0)
    simulation = run_to_end(quiet)
    trace = table_of(episode).trace
    gaps = {round(b - a, 6) for rows in table_of(episode).sessions("train")
            for a, b in pairwise(trace.arrival_seconds[rows].tolist())}  # fmt: skip
    by_first_block: dict[int, list[float]] = {}
    for request in simulation.finished:
        by_first_block.setdefault(request.block_hash(1), []).append(request.arrival_time)
    seen = [round(b - a, 6) for times in by_first_block.values() for a, b in pairwise(sorted(times))]
    assert len(seen) > 5
    assert set(seen) <= gaps


def test_one_off_prompts_have_no_second_turn(episode):
    simulation = run_to_end(replace(episode, streams=(stream("one-off", (0.0, 1.0)),)))
    roots = [request.block_hash(1) for request in simulation.finished]
    assert len(roots) > 80
    assert len(set(roots)) == len(roots), "copies of a session share no block of their own"


def test_a_flood_is_refused_and_users_go_on(episode):
    users, flood = stream("closed", (0.0, 5.0)), stream("one-off", (0.0, 40.0))
    simulation = run_to_end(replace(episode, streams=(users, flood), seconds=40.0))
    stats, scheduler = simulation.engine.snapshot(), simulation.engine.scheduler
    left = len(scheduler.running) + len(scheduler.waiting)
    assert len(simulation.refused) > 100
    assert stats.total("requests_received") == stats.total("requests_finished") + left
    assert sum(source.present == [True] * 5 for source in simulation.sources) == 1
    simulation.engine.check_integrity()
