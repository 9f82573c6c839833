"""The course of one episode per workload, all policies on the same axes."""

from collections.abc import Sequence
from typing import Any

from kvpilot.agent.evaluation.outcome import Outcomes
from kvpilot.env.pages.figure import GRID, Figure, frame
from kvpilot.env.tuning.rollout import EpisodeResult

SHOWN = ("default", "static-best", "hysteresis", "oracle")  # and what was given by file
COLORS = {"default": "#51657d", "static-best": "#1d4e89", "hysteresis": "#3c8d5a", "oracle": "#b8a24a"}
OTHERS = ("#c8551b", "#7d4f9e", "#b3261e", "#4f9d9d")
SMOOTH_WINDOWS = 5
KNOBS = ("kv_level", "max_batch", "size_factor", "ttl_seconds")


def make_timelines(outcomes: Outcomes, learned: Sequence[str]) -> list[tuple[str, list[Figure]]]:
    """By workload: charts of the first of its episodes, of the first seed of each policy."""
    labels = [label for label in outcomes.labels if label in SHOWN or label in learned]
    colors = dict(COLORS)
    for place, label in enumerate(one for one in labels if one not in COLORS):
        colors[label] = OTHERS[place % len(OTHERS)]
    pages = []
    for family in dict.fromkeys(outcomes.families):
        first = outcomes.families.index(family)
        runs = {label: outcomes.results[label][0][first] for label in labels}
        pages.append((family, _charts(family, runs, colors)))
    return pages


def _charts(family: str, runs: dict[str, EpisodeResult], colors: dict[str, str]) -> list[Figure]:
    smoothed = f"Mean over {SMOOTH_WINDOWS} windows."
    phases = _phases(next(iter(runs.values())))
    charts = [
        _chart(f"{family}-reward", "Reward", smoothed, runs, colors, lambda run: _smooth(_rewards(run))),
        _chart(
            f"{family}-hits",
            "Prefix hit rate",
            smoothed,
            runs,
            colors,
            lambda run: _smooth(_seen(run, "hit_rate")),
        ),
        _chart(f"{family}-waiting", "Requests waiting", "", runs, colors, lambda run: _seen(run, "waiting")),
    ]
    for knob in KNOBS:
        charts.append(
            _chart(
                f"{family}-{knob}",
                f"Knob {knob}",
                "",
                runs,
                colors,
                lambda run, knob=knob: _knob(run, knob),
                "hv",
            )
        )
    for chart in charts:
        chart["layout"] |= phases
    return charts


def _chart(
    name: str,
    title: str,
    note: str,
    runs: dict[str, EpisodeResult],
    colors: dict[str, str],
    series: Any,
    shape: str = "linear",
) -> Figure:
    traces = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": label,
            "x": [round(second / 60, 2) for second in run.windows["seconds"]],
            "y": series(run),
            "line": {"color": colors[label], "width": 2, "shape": shape},
        }
        for label, run in runs.items()
    ]
    layout = frame(260, top=24, bottom=40) | {
        "xaxis": {**GRID, "title": {"text": "minutes"}},
        "yaxis": {**GRID, "automargin": True},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.08, "yanchor": "bottom"},
    }
    return {"id": name, "title": title, "note": note, "traces": traces, "layout": layout}


def _phases(run: EpisodeResult) -> dict[str, Any]:
    """A line where the regime changes, with its name."""
    minutes = [second / 60 for second in run.windows["seconds"]]
    phases = run.windows["phase"]
    starts = [k for k in range(len(phases)) if k == 0 or phases[k] != phases[k - 1]]
    lines = [
        {"type": "line", "x0": minutes[k], "x1": minutes[k], "y0": 0, "y1": 1, "yref": "paper",
         "line": {"color": "#c9c9bd", "width": 1, "dash": "dot"}}
        for k in starts[1:]
    ]  # fmt: skip
    names = [
        {"x": minutes[k], "y": 1, "yref": "paper", "text": phases[k], "showarrow": False, "xanchor": "left",
         "yanchor": "bottom", "font": {"size": 10, "color": "#6b6b63"}}
        for k in starts
    ]  # fmt: skip
    return {"shapes": lines, "annotations": names}


def _rewards(run: EpisodeResult) -> list[float | None]:
    return [parts["total"] for parts in run.windows["reward"]]


def _seen(run: EpisodeResult, name: str) -> list[float | None]:
    values = [observation.get(name) for observation in run.windows["observation"]]
    return [value if isinstance(value, int | float) else None for value in values]


def _knob(run: EpisodeResult, name: str) -> list[float]:
    return [knobs[name] for knobs in run.windows["knobs"]]


def _smooth(values: Sequence[float | None]) -> list[float | None]:
    half, smooth = SMOOTH_WINDOWS // 2, []
    for k in range(len(values)):
        near = [value for value in values[max(0, k - half) : k + half + 1] if value is not None]
        smooth.append(round(sum(near) / len(near), 4) if near else None)
    return smooth
