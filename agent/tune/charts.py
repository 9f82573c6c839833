"""The page of a tuning run: how the search went, what mattered, what was given up for what."""

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvpilot.agent.tune.result import TunedResult
from kvpilot.agent.tune.search import reward_of
from kvpilot.engine.files import save
from kvpilot.env.pages.figure import GRID, Figure, frame, log_axis
from kvpilot.env.pages.page import render_page

if TYPE_CHECKING:
    import optuna

INK, ACCENT, SOFT = "#1d4e89", "#c8551b", "#c9c9bd"
KNOBS = ("ttl_seconds", "size_factor", "max_batch", "kv_level")
LOGARITHMIC = ("ttl_seconds", "max_batch")
HISTORY_NOTE = (
    "Each dot is a setting; grey ones were given up after the short runs, at what they had reached by then."
)
PARETO_NOTE = (
    "Settings run in full; the line joins those that no other beats in both, the colour is the quality loss "
    "(mean KL in nats per token)."
)


def write_page(result: TunedResult, studies: Mapping[str, "optuna.Study"], tables: Any, path: Path) -> None:
    """Raises KVPilotError where `path` cannot be written."""
    save(path, render(result, studies, tables))


def render(result: TunedResult, studies: Mapping[str, "optuna.Study"], tables: Any) -> str:
    charts = make_charts(studies)
    return render_page("kvpilot.agent.tune", "tune.html.j2", charts=charts, result=result, tables=tables)


def make_charts(studies: Mapping[str, "optuna.Study"]) -> list[Figure]:
    """`id`, `title`, `note`, `traces`, `layout`; only those that have something to show."""
    charts: list[Figure] = []
    for name, study in studies.items():
        rule = name.startswith("rule")
        title = "the rule" if rule else "all workloads" if name == "all" else name
        charts += [_history(study, name, title), _importances(study, name, title)]
        if name == "all":
            charts += [_slice(study, knob) for knob in KNOBS] + _pareto(study)
    return [chart for chart in charts if chart["traces"]]


def _history(study: "optuna.Study", name: str, title: str) -> Figure:
    from optuna.trial import TrialState

    done = _complete(study)
    pruned = study.get_trials(deepcopy=False, states=(TrialState.PRUNED,))
    best, so_far = [], float("-inf")
    for trial in done:
        so_far = max(so_far, reward_of(trial))
        best.append(so_far)
    traces = [
        _dots([t.number for t in done], [reward_of(t) for t in done], "in full", INK),
        _dots([t.number for t in pruned], [t.value for t in pruned], "given up early", SOFT),
        {
            "type": "scatter",
            "mode": "lines",
            "x": [t.number for t in done],
            "y": best,
            "name": "best so far",
            "line": {"shape": "hv", "color": ACCENT, "width": 2},
        },
    ]
    shown = [trace for trace in traces if trace["x"]]
    return _figure(
        f"history-{name}", f"Mean reward of each trial: {title}", HISTORY_NOTE, shown, "trial", "reward"
    )


def _importances(study: "optuna.Study", name: str, title: str) -> Figure:
    """By PED-ANOVA, which takes low values as the good ones."""
    import optuna

    shares: dict[str, float] = {}
    if len(_complete(study)) >= 10:
        evaluator = optuna.importance.PedAnovaImportanceEvaluator(evaluate_on_local=False)
        with warnings.catch_warnings():  # of every target, that low values have to be the good ones: they are
            warnings.simplefilter("ignore", UserWarning)
            shares = optuna.importance.get_param_importances(
                study, evaluator=evaluator, target=lambda t: -reward_of(t)
            )
    bars = {
        "type": "bar",
        "orientation": "h",
        "x": list(shares.values()),
        "y": list(shares),
        "marker": {"color": INK},
    }
    note = "What distinguishes the better settings from all (PED-ANOVA)."
    figure = _figure(
        f"importance-{name}", f"What mattered: {title}", note, [bars] if shares else [], "share", ""
    )
    figure["layout"]["yaxis"]["autorange"] = "reversed"
    return figure


def _slice(study: "optuna.Study", knob: str) -> Figure:
    done = [trial for trial in _complete(study) if knob in trial.params]
    values = [trial.params[knob] for trial in done]
    traces = [_dots(values, [reward_of(trial) for trial in done], "", INK)] if done else []
    figure = _figure(
        f"slice-{knob}", f"Reward by {knob}", "The other knobs differ, too.", traces, knob, "reward"
    )
    if values and knob in LOGARITHMIC:
        figure["layout"]["xaxis"] |= log_axis(min(values), max(values))
    return figure


def _pareto(study: "optuna.Study") -> list[Figure]:
    points = [trial.user_attrs["figures"] for trial in _complete(study)]
    return [
        _front(points, "hit_rate", "latency_seconds", "Hit rate against mean latency"),
        _front(points, "hit_rate", "quality_loss", "Hit rate against quality loss"),
    ]


def _front(points: Sequence[Mapping[str, float]], x: str, y: str, title: str) -> Figure:
    """Upwards is better in `x`, downwards in `y`."""
    front = [p for p in points if not any(_beats(other, p, x, y) for other in points)]
    front.sort(key=lambda p: (p[x], p[y]))
    color = [p["quality_loss"] for p in points]
    marker = {
        "size": 8,
        "color": color,
        "colorscale": "YlOrRd",
        "showscale": True,
        "line": {"width": 0.5, "color": INK},
    }
    traces: list[dict[str, Any]] = []
    if points:
        line = {"color": ACCENT, "width": 2, "shape": "hv"}
        traces = [
            {"type": "scatter", "mode": "lines", "x": _of(front, x), "y": _of(front, y), "line": line, "name": "front"},
            {"type": "scatter", "mode": "markers", "x": _of(points, x), "y": _of(points, y), "marker": marker,
             "name": "settings"},
        ]  # fmt: skip
    figure = _figure(f"pareto-{y}", title, PARETO_NOTE, traces, x.replace("_", " "), y.replace("_", " "))
    figure["layout"]["showlegend"] = False
    return figure


def _beats(one: Mapping[str, float], other: Mapping[str, float], x: str, y: str) -> bool:
    no_worse = one[x] >= other[x] and one[y] <= other[y]
    return no_worse and (one[x] > other[x] or one[y] < other[y])


def _of(points: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [float(f"{point[name]:.5g}") for point in points]


def _complete(study: "optuna.Study") -> list["optuna.trial.FrozenTrial"]:
    from optuna.trial import TrialState

    return study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))


def _dots(x: Sequence[float], y: Sequence[Any], name: str, color: str) -> dict[str, Any]:
    marker = {"size": 7, "color": color, "opacity": 0.8}
    return {"type": "scatter", "mode": "markers", "x": list(x), "y": list(y), "name": name, "marker": marker}


def _figure(name: str, title: str, note: str, traces: list[dict[str, Any]], x: str, y: str) -> Figure:
    axis = {**GRID, "automargin": True}
    layout = frame(300) | {
        "xaxis": {**axis, "title": {"text": x}},
        "yaxis": {**axis, "title": {"text": y, "standoff": 8}},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "y": 1.02, "yanchor": "bottom"},
        "showlegend": sum(bool(trace.get("name")) for trace in traces) > 1,
    }
    return {"id": name, "title": title, "note": note, "traces": traces, "layout": layout}
