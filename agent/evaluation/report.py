"""The page of an evaluation, and the same as JSON."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpilot.agent.evaluation.outcome import BASELINES, FIGURES, Outcomes
from kvpilot.agent.evaluation.runs import episode_hash
from kvpilot.agent.evaluation.sheets import (
    differences_sheet,
    learned_labels,
    policies_sheet,
    rewards_sheet,
    sentences,
    tuning_sheet,
)
from kvpilot.agent.evaluation.timelines import make_timelines
from kvpilot.agent.policies.spec import PolicySpec
from kvpilot.engine.files import save
from kvpilot.env.pages.page import render_page
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.sessions import SPLITS

FORM = 1  # rises when a reader of older files would misread newer ones


def write_report(
    outcomes: Outcomes,
    policies: Sequence[PolicySpec],
    episodes: Sequence[Episode],
    facts: Mapping[str, Any],
    out: Path,
) -> Path:
    """JSON at `out` and the page beside it, whose path is returned. Raises KVPilotError."""
    page = out.with_suffix(".html")
    values = as_json(outcomes, policies, episodes, facts)
    save(out, json.dumps(values, indent=1, allow_nan=False) + "\n")
    save(page, render(outcomes, values))
    return page


def as_json(
    outcomes: Outcomes, policies: Sequence[PolicySpec], episodes: Sequence[Episode], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Summaries per episode and policy, and per group all means, differences and shares."""
    return {
        "kvpilot_evaluation": FORM,
        **facts,
        "split": split_facts(episodes),
        "policies": [vars(policy) | {"config": dict(policy.config)} for policy in policies],
        "episodes": [
            {"family": e.family, "seed": e.seed, "hours": e.seconds / 3600, "hash": episode_hash(e)}
            for e in episodes
        ],
        "results": {
            label: [[result.summary for result in results] for results in seeds]
            for label, seeds in outcomes.results.items()
        },
        "groups": {group: _group(outcomes, places) for group, places in outcomes.groups().items()},
        "failures": dict(outcomes.failures),
    }


def split_facts(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Which sessions were held out, and how many there are."""
    sizes: dict[str, dict[str, int]] = {}
    for episode in episodes:
        for stream, table in zip(episode.streams, episode.tables(), strict=True):
            if stream.file not in sizes:
                sizes[stream.file] = {name: len(table.sessions(name)) for name in SPLITS}
    return {
        "evaluated_on": sorted({episode.split for episode in episodes}),
        "rule": "by a hash of file and session: no session is in two splits",
        "sessions": sizes,
    }


def _group(outcomes: Outcomes, places: list[int]) -> dict[str, Any]:
    return {
        "episodes": places,
        "oracle_gain": outcomes.oracle_gain(places),
        "can_be_won": outcomes.can_be_won(places),
        "policies": {label: _policy(outcomes, label, places) for label in outcomes.labels},
    }


def _policy(outcomes: Outcomes, label: str, places: list[int]) -> dict[str, Any]:
    closed = outcomes.closed(label, places)
    return {
        **{".".join(figure.path): outcomes.mean(label, figure.path, places) for figure in FIGURES},
        "reward_by_seed": outcomes.by_seed(label, places),
        "over": {
            name: outcomes.difference(label, name, places)._asdict()
            for name in BASELINES
            if name in outcomes.labels and name != label
        },
        "gap_closed": None if closed is None else closed._asdict(),
    }


def render(outcomes: Outcomes, values: Mapping[str, Any]) -> str:
    learned = learned_labels(outcomes)
    timelines = make_timelines(outcomes, learned)
    others = [label for label in outcomes.labels if label not in ("default", "static-best", "oracle")]
    return render_page(
        "kvpilot.agent.evaluation",
        "evaluate.html.j2",
        charts=[chart for _, page in timelines for chart in page],
        values=values,
        sentences=sentences(outcomes),
        first=tuning_sheet(outcomes),
        rewards=rewards_sheet(outcomes),
        differences=[differences_sheet(outcomes, label) for label in dict.fromkeys([*learned, *others])],
        figures=[policies_sheet(outcomes, group) for group in outcomes.groups()],
        timelines=timelines,
    )
