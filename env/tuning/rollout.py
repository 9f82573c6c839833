"""A policy through an episode: columns per window and figures of the whole. Deterministic."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, runtime_checkable

import numpy as np

from kvpilot.env.policy import Policy
from kvpilot.env.replay.summary import percentiles
from kvpilot.env.slo import Slo
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.reward import Reward, RewardParts
from kvpilot.env.tuning.run import EpisodeRun, WindowRecord
from kvpilot.env.tuning.session import SimulatedSession

BAD_SHARE = 0.1  # a window with more of its tokens beyond the SLO counts to the minutes of violation


@runtime_checkable
class Clairvoyant(Protocol):
    """A policy that may look ahead in the run it controls: `attach` is called as the run begins."""

    def attach(self, run: EpisodeRun) -> None: ...


@dataclass(frozen=True, kw_only=True)
class EpisodeResult:
    """`windows` are columns of equal length, one row per window under control; `summary` see `summarize`."""

    policy: str
    episode: dict[str, Any]  # Episode.to_json
    windows: dict[str, list[Any]]
    summary: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))

    @property
    def reward(self) -> float:
        """Mean per window."""
        return self.summary["reward"]


def start_run(
    episode: Episode, *, reward: Reward | None = None, knobs: Mapping[str, object] | None = None
) -> EpisodeRun:
    """The episode at the end of its warm-up, with its reference; `knobs` hold from the start of the warm-up."""
    return EpisodeRun(
        episode.start(knobs),
        interval_seconds=episode.interval_seconds,
        slo=episode.slo,
        reward=reward,
        reference=episode.reference(),
    )


def run_episode(
    episode: Episode,
    policy: Policy,
    *,
    decide_every: int = 2,
    reward: Reward | None = None,
    until: float | None = None,
    on_window: Callable[[WindowRecord], None] | None = None,
    start_knobs: Mapping[str, object] | None = None,
) -> EpisodeResult:
    """The policy decides every `decide_every` windows, on what it saw since the decision before.

    `until` ends the run after so many seconds under control. `on_window` may raise to stop it. `start_knobs` hold
    from the start of the warm-up; left out, every policy meets the same state. Raises KnobInvalidError for a
    proposal out of bounds.
    """
    run = start_run(episode, reward=reward, knobs=start_knobs)
    policy.reset()
    if isinstance(policy, Clairvoyant):
        policy.attach(run)
    observation, records = run.first, []
    num_windows = inf if until is None else max(1, int(until // episode.interval_seconds))
    while not run.is_done and len(records) < num_windows:
        proposal = policy.propose(observation, run.session.knobs, run.session.bounds)
        left = min(decide_every, num_windows - len(records))
        observation, new = run.step(proposal.knobs, int(left))
        records += new
        if on_window is not None:
            for record in new:
                on_window(record)
    assert isinstance(run.session, SimulatedSession)
    return EpisodeResult(
        policy=policy.name,
        episode=episode.to_json(),
        windows=_columns(episode, records),
        summary=summarize(episode, records, run.session),
    )


def _columns(episode: Episode, records: list[WindowRecord]) -> dict[str, list[Any]]:
    return {
        "seconds": [record.observation.time - episode.warmup_seconds for record in records],
        "phase": [episode.phase_at(record.index) for record in records],
        "observation": [record.observation.as_dict() for record in records],
        "reward": [record.reward._asdict() for record in records],
        "knobs": [dict(record.knobs) for record in records],
        "changes": [record.changes for record in records],
    }


def summarize(episode: Episode, records: list[WindowRecord], session: SimulatedSession) -> dict[str, Any]:
    """Rewards, rates and percentiles over the windows under control, and over the requests that ended in them.

    `goodput_share` counts good answers against all that ended or was refused; `requests_left` are under way at the
    end and counted in no percentile; `quality_loss` is the mean KL over the pages read; None stands for "nothing to
    measure".
    """
    start, end = records[0].window.start, records[-1].window.end
    hours = (end.time - start.time) / 3600
    totals = {name: end.total(name) - start.total(name) for name in COUNTERS}
    rewards = [record.reward.total for record in records]
    changes = sum(record.changes for record in records)
    bad = [r for r in records if (r.observation.slo_violation_share or 0.0) > BAD_SHARE]
    return {
        "reward": float(np.mean(rewards)),
        "reward_parts": {
            name: float(np.mean([getattr(record.reward, name) for record in records]))
            for name in RewardParts._fields
        },
        "worst_window": min(rewards),
        "hit_rate": _ratio(totals["prefix_hit_tokens"], totals["prefix_query_tokens"]),
        **_request_figures(session, episode.slo, start.time),
        "evictions": totals["pages_released"],
        "preemptions": totals["preemptions"],
        "stepped_down": totals["pages_stepped_down"],
        "quality_loss": _quality_loss(records),
        "knob_changes": changes,
        "changes_per_hour": changes / hours,
        "slo_violation_minutes": sum(record.window.seconds for record in bad) / 60,
        "windows": len(records),
        "hours": hours,
    }


COUNTERS = ("prefix_hit_tokens", "prefix_query_tokens", "pages_released", "preemptions", "pages_stepped_down")


def _request_figures(session: SimulatedSession, slo: Slo, start: float) -> dict[str, Any]:
    done = [r for r in session.simulation.finished if r.is_answered and (r.finish_time or 0.0) >= start]
    refused, scheduler = len(session.simulation.refused), session.simulation.engine.scheduler
    ttft = np.array([(r.first_token_time or 0.0) - r.arrival_time for r in done])
    e2e = np.array([(r.finish_time or 0.0) - r.arrival_time for r in done])
    gaps = np.array([r.mean_gap_seconds for r in done], dtype=float)  # nan for a single token
    good = int(np.count_nonzero(slo.is_met(ttft, gaps)))
    return {
        "requests_done": len(done),
        "requests_refused": refused,
        "requests_left": len(scheduler.running) + len(scheduler.waiting),
        "goodput_share": _ratio(good, len(done) + refused),
        "e2e_seconds": percentiles(e2e),
        "ttft_seconds": percentiles(ttft),
        "inter_token_seconds": percentiles(gaps),
    }


def _quality_loss(records: list[WindowRecord]) -> float:
    reads = [record.window.total("pages_read") for record in records]
    losses = [record.observation.quality_loss or 0.0 for record in records]
    return float(np.average(losses, weights=reads)) if sum(reads) else 0.0


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
