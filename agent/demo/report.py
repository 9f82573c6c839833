"""Writes run.json's content as one HTML page that needs nothing else."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup
from plotly.offline import get_plotlyjs

from kvpilot.agent.demo.charts import make_charts
from kvpilot.agent.demo.summary import NUM_TILES, accounts, cut_off, outcome, summarize

WRITTEN = ("applied", "pending", "effective", "failed")


def write_report(data: dict[str, Any], path: Path) -> Path:
    """Renders and writes the page; returns `path`."""
    path.write_text(render(data), encoding="utf-8")
    return path


def render(data: dict[str, Any]) -> str:
    """The page. `data` is what run.json holds; runs that are empty or broken off are shown as they are."""
    template = files("kvpilot.agent.demo").joinpath("report.html.j2").read_text(encoding="utf-8")
    charts, tables = make_charts(data), summarize(data)
    decisions = [decision for run in data["runs"] for decision in run["decisions"]]
    refusals: dict[str, int] = {}
    for constraint in (c for decision in decisions for c in decision["constraints"]):
        refusals[constraint["reason"]] = refusals.get(constraint["reason"], 0) + 1
    return (
        Environment(autoescape=True)
        .from_string(template)
        .render(
            data=data,
            charts=charts,
            chart_json=Markup(script_safe_json(charts)),
            plotly=Markup(get_plotlyjs()),
            outcome=outcome(data),
            tables=tables,
            tiles=tables[0][1][:NUM_TILES],
            cut_off=[(run["name"], text) for run in data["runs"] if (text := cut_off(run))],
            accounts=[(run["name"], accounts(run)) for run in data["runs"]],
            decisions=[decision for decision in decisions if decision["outcome"] in WRITTEN],
            num_decisions=len(decisions),
            refusals=sorted(refusals.items(), key=lambda item: -item[1]),
            quality=next(
                (run["quality_loss"] for run in data["runs"] if any(run["quality_loss"].values())), {}
            ),
        )
    )


def script_safe_json(value: object) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(value, allow_nan=False).replace("<", "\\u003c")
