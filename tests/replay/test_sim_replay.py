"""A simulated replay: every request accounted for, windows that add up, and what the options do."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from kvpilot.engine.config import Knobs
from kvpilot.engine.errors import ConfigError
from kvpilot.env.replay.report import unanswered
from kvpilot.env.replay.result import ReplayFormError, read_result
from kvpilot.env.replay.sim import make_simulation, replay_simulated
from kvpilot.env.slo import Slo


def with_engine(replay, **changes):
    return replace(replay, engine=replay.engine.with_(**changes))


def test_every_request_is_accounted_for(chats, replay):
    result = replay_simulated(chats, replay)
    requests, summary = result.requests, result.summary
    assert requests["row"] == list(range(len(chats)))
    assert set(requests["status"]) == {"done"}
    assert requests["output_tokens"] == chats.output_tokens.tolist()
    assert requests["arrival_seconds"] == chats.arrival_seconds.tolist()
    for queue, ttft, whole in zip(
        requests["queue_seconds"], requests["ttft_seconds"], requests["e2e_seconds"], strict=True
    ):
        assert 0 <= queue < ttft <= whole
    assert summary["hit_rate"] == pytest.approx(sum(requests["cached_tokens"]) / chats.prompt_tokens.sum())
    assert not result.is_partial


def test_windows_add_up_to_the_whole(chats, replay):
    result = replay_simulated(chats, with_engine(replay, knobs=Knobs(max_batch=8, kv_level=2)))
    windows, requests = result.windows, result.requests
    assert sum(windows["generated_tokens"]) == sum(requests["output_tokens"])
    assert sum(windows["hit_tokens"]) == sum(requests["cached_tokens"])
    assert sum(windows["finished"]) == len(chats)
    assert sum(windows["seconds"]) == pytest.approx(windows["end_seconds"][-1])
    assert sum(row["int4"] for row in windows["stepped_down"]) == result.summary["stepped_down"]["int4"] > 0
    pool = replay.engine.pool_bytes
    for by_state, free in zip(windows["pool_bytes"], windows["free_bytes"], strict=True):
        assert sum(sum(levels.values()) for levels in by_state.values()) + free <= pool


def test_windows_only_look(chats, replay):
    coarse, fine = (replay_simulated(chats, replace(replay, window_seconds=s)) for s in (1000.0, 0.37))
    assert coarse.requests == fine.requests
    assert len(fine.windows["seconds"]) > 50 > len(coarse.windows["seconds"])


def test_goodput_counts_what_was_in_time_against_all(chats, replay):
    result = replay_simulated(chats, replay)
    pairs = zip(result.requests["ttft_seconds"], result.requests["inter_token_seconds"], strict=True)
    good = sum(ttft <= 0.2 and (gap is None or gap <= 0.05) for ttft, gap in pairs)
    assert result.summary["goodput_share"] == pytest.approx(good / len(chats))
    assert 0 < good < len(chats)


def test_lower_precision_holds_more_and_costs_quality(chats, replay):
    exact = replay_simulated(chats, replay).summary
    lossy = replay_simulated(chats, with_engine(replay, knobs=Knobs(max_batch=8, kv_level=2))).summary
    assert lossy["hit_rate"] > exact["hit_rate"] + 0.05
    assert 0 < lossy["quality_loss"] < 0.01
    assert exact["quality_loss"] == 0


def test_the_oracle_beats_lru(chats, replay):
    lru, oracle = (
        replay_simulated(chats, with_engine(replay, eviction=name)).summary["hit_rate"]
        for name in ("lru", "belady")
    )
    assert oracle > lru + 0.03


def test_stopped_replays_hold_what_happened_until_then(chats, replay):
    seen = []
    result = replay_simulated(
        chats, replay, progress=lambda done, total: seen.append(done), is_stopped=lambda: len(seen) == 3
    )
    assert result.is_partial
    assert 0 < result.summary["requests"] < len(chats)
    assert set(result.requests["status"]) <= {"done", "cut off"}
    ended = replay_simulated(chats, replace(replay, end_seconds=8.0))
    assert ended.is_partial
    assert max(ended.requests["arrival_seconds"]) <= 8.0


def test_refused_requests_are_listed(chats, replay):
    short = replace(replay.profile, model=replace(replay.model, max_len=100))
    result = replay_simulated(chats, replace(replay, profile=short))
    refused = [row for row, status in enumerate(result.requests["status"]) if status == "refused"]
    assert refused == np.flatnonzero(chats.prompt_tokens >= 100).tolist()
    assert result.summary["goodput_share"] < 1 - len(refused) / len(chats) + 1e-9
    reason = "prompt too long: 100 tokens or more (what model and pool hold)"
    assert result.summary["reasons"] == {"refused": {reason: len(refused)}}
    assert unanswered(result) == [f"refused {len(refused)} of {len(chats)}: {len(refused)} {reason}"]


def test_a_full_queue_is_another_reason_than_a_long_prompt(chats, replay):
    burst = chats.replace(arrival_seconds=np.zeros(len(chats)), think_seconds=np.zeros(len(chats)))
    result = replay_simulated(burst, with_engine(replay, max_waiting=3))
    assert result.summary["reasons"]["refused"] == {"queue full: 3 requests waiting": len(chats) - 3}


def test_the_speed_counts_what_was_simulated(chats, replay):
    result = replay_simulated(chats, replace(replay, end_seconds=8.0))
    facts = result.provenance
    simulated = facts["requests_simulated_per_second"] * facts["simulated_in_seconds"]
    assert simulated == pytest.approx(len(result.requests["row"]))
    assert len(result.requests["row"]) < len(chats)


def test_in_closed_loop_a_turn_comes_after_the_answer_before_and_the_thinking(chats, replay):
    result = replay_simulated(chats, replace(replay, users=3))
    requests = result.requests
    rows = sorted(
        zip(*(requests[name] for name in ("session", "turn", "arrival_seconds", "e2e_seconds")), strict=True)
    )
    for (session, _, arrival, seconds), (next_session, _, next_arrival, _) in pairwise(rows):
        if session == next_session:
            assert next_arrival == pytest.approx(arrival + seconds + 2.0)
    events = sorted(
        [(a, 1) for _, _, a, _ in rows] + [(a + s, -1) for _, _, a, s in rows], key=lambda e: (e[0], e[1])
    )
    assert max(np.cumsum([change for _, change in events])) <= 3
    assert len(rows) == len(chats)


def test_the_oracle_is_refused_in_closed_loop(replay):
    with pytest.raises(ConfigError, match="closed loop"):
        replace(with_engine(replay, eviction="belady"), users=2)


def test_closed_loop_needs_think_times(chats, replay):
    unknown = chats.replace(think_seconds=np.full(len(chats), np.nan))
    with pytest.raises(ConfigError, match="think_seconds"):
        make_simulation(unknown, replace(replay, users=2))


def test_results_are_written_and_read_back(tmp_path, chats, replay):
    result = replay_simulated(chats, replay)
    result.write(tmp_path / "r.json")
    again = read_result(tmp_path / "r.json")
    assert again.requests["status"] == result.requests["status"]
    assert again.requests["ttft_seconds"] == pytest.approx(result.requests["ttft_seconds"], rel=1e-6)
    assert again.slo == Slo(ttft_seconds=0.2, inter_token_seconds=0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("change", [{"summary": {}}, {"summary": 3}, {"requests": {}}, {"windows": None}])
def test_results_that_lack_a_part_are_refused(tmp_path, chats, replay, change):
    replay_simulated(chats, replay).write(tmp_path / "r.json")
    values = json.loads((tmp_path / "r.json").read_text()) | change
    (tmp_path / "r.json").write_text(json.dumps(values))
    with pytest.raises(ReplayFormError, match=next(iter(change))):
        read_result(tmp_path / "r.json")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"kvpilot_replay": 99}', '{"kvpilot_replay": 1, "target": "sim"}']
)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ReplayFormError, match=r"x\.json"):
        read_result(tmp_path / "x.json")
