"""A policy through an episode, and the look-ahead of those who may."""

import json
from dataclasses import replace

import numpy as np
import pytest

from kvpilot.engine.errors import KnobInvalidError
from kvpilot.env.policy import Proposal
from kvpilot.env.tuning.lookahead import LookaheadError, lookahead
from kvpilot.env.tuning.rollout import run_episode, start_run


class Fixed:
    """Proposes the same at every decision, and keeps what it saw."""

    name = "fixed"

    def __init__(self, **knobs):
        self.knobs, self.seen = knobs, []

    def reset(self):
        self.seen.clear()

    def propose(self, observation, knobs, bounds):
        self.seen.append(observation)
        return Proposal(self.knobs, "always")


class Greedy(Fixed):
    """Takes what looks best from here."""

    name = "greedy"
    choices = ({"kv_level": 0}, {"kv_level": 1}, {"kv_level": 2})

    def attach(self, run):
        self.run, self.values = run, []

    def propose(self, observation, knobs, bounds):
        self.values.append(lookahead(self.run, self.choices, 30.0))
        return Proposal(self.choices[int(np.argmax(self.values[-1]))], "best of three")


def test_a_run_is_deterministic_and_json(episode):
    first, again = (run_episode(episode, Fixed(kv_level=1)) for _ in range(2))
    assert first == again
    text = json.dumps(first.to_json(), allow_nan=False)
    assert json.loads(text)["summary"]["windows"] == episode.num_windows
    assert {len(column) for column in first.windows.values()} == {episode.num_windows}


def test_the_policy_sees_all_since_its_last_decision(episode):
    policy = Fixed()
    run_episode(episode, policy, decide_every=3)
    lengths = [observation.seconds for observation in policy.seen]
    assert len(lengths) == episode.num_windows / 3
    assert lengths == pytest.approx([10.0, 30.0, 30.0, 30.0], abs=0.5)
    assert policy.seen[0].time == pytest.approx(episode.warmup_seconds, abs=0.5)


def test_figures_are_those_of_the_requests(episode):
    result = run_episode(episode, Fixed(kv_level=2, size_factor=0.5, ttl_seconds=30.0))
    summary, windows = result.summary, result.windows
    assert (
        summary["reward"] == result.reward == pytest.approx(np.mean([r["total"] for r in windows["reward"]]))
    )
    assert summary["worst_window"] == min(r["total"] for r in windows["reward"])
    assert summary["knob_changes"] == sum(windows["changes"]) == 3
    assert summary["changes_per_hour"] == pytest.approx(3 / (120 / 3600), rel=0.01)
    assert 0 < summary["hit_rate"] < 1
    assert 0 < summary["quality_loss"] < 0.0012
    assert summary["requests_done"] > 50
    ttft, whole = summary["ttft_seconds"], summary["e2e_seconds"]
    assert ttft["p50"] <= ttft["p90"] <= ttft["p99"]
    assert ttft["mean"] < whole["mean"]
    assert windows["phase"][0] == "quiet"
    assert windows["seconds"][-1] == pytest.approx(120.0, abs=0.5)


def test_defaults_are_the_reference(episode):
    """The default configuration saves nothing against itself, but for the smoothing of the reference."""
    result = run_episode(episode, Fixed())
    latency = [reward["latency"] for reward in result.windows["reward"]]
    assert abs(np.mean(latency)) < 0.05
    assert result.summary["knob_changes"] == 0


def test_a_run_can_be_cut_short(episode):
    seen = []
    short = run_episode(episode, Fixed(), until=35.0, on_window=seen.append)
    whole = run_episode(episode, Fixed())
    assert [record.index for record in seen] == [0, 1, 2]
    assert short.windows["reward"] == whole.windows["reward"][:3]

    class EnoughError(Exception):
        pass

    def stop(record):
        if record.index == 1:
            raise EnoughError

    with pytest.raises(EnoughError):
        run_episode(episode, Fixed(), on_window=stop)


def test_a_proposal_out_of_bounds_is_an_error(episode):
    with pytest.raises(KnobInvalidError, match="kv_level=7"):
        run_episode(episode, Fixed(kv_level=7))


def test_start_knobs_hold_from_the_warm_up(episode):
    result = run_episode(episode, Fixed(), start_knobs={"kv_level": 2})
    assert result.windows["knobs"][0]["kv_level"] == 2
    assert result.summary["knob_changes"] == 0


# ---------------------------------------------------------------------- look-ahead
def test_looking_ahead_foretells_and_leaves_no_trace(episode):
    looked, plain = start_run(episode), start_run(episode)
    for run in (looked, plain):
        run.step({"kv_level": 1}, 3)
    settings = [{"kv_level": 0}, {"kv_level": 2}, {"kv_level": 1, "size_factor": 0.7, "ttl_seconds": 60.0}]
    foretold = lookahead(looked, settings, 40.0)
    assert len(set(foretold)) == 3
    for k, changes in enumerate(settings):
        run = start_run(episode)
        run.step({"kv_level": 1}, 3)
        assert run.step(changes, 4).reward == foretold[k]
    assert looked.step({}, 4) == plain.step({}, 4)


def test_a_clairvoyant_policy_is_attached(episode):
    oracle = run_episode(episode, Greedy(), decide_every=2)
    statics = [run_episode(episode, Fixed(**choice), decide_every=2).reward for choice in Greedy.choices]
    assert oracle.reward > min(statics)
    assert run_episode(episode, Greedy(), decide_every=2) == oracle


def test_a_failing_look_ahead_is_said(episode):
    run = start_run(replace(episode, seconds=30.0))
    with pytest.raises(LookaheadError, match="KnobInvalidError: kv_level=9"):
        lookahead(run, [{"kv_level": 9}], 10.0)
