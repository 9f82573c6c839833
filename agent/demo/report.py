"""Writes run.json's content as one HTML page that needs nothing else."""

from pathlib import Path
from typing import Any

from kvpilot.agent.demo.charts import make_charts
from kvpilot.agent.demo.summary import NUM_TILES, accounts, cut_off, outcome, summarize
from kvpilot.engine.files import save
from kvpilot.env.pages.page import render_page

WRITTEN = ("applied", "pending", "effective", "failed")


def write_report(data: dict[str, Any], path: Path) -> Path:
    """Renders and writes the page; returns `path`."""
    save(path, render(data))
    return path


def render(data: dict[str, Any]) -> str:
    """The page. `data` is what run.json holds; runs that are empty or broken off are shown as they are."""
    tables = summarize(data)
    decisions = [decision for run in data["runs"] for decision in run["decisions"]]
    refusals: dict[str, int] = {}
    for constraint in (c for decision in decisions for c in decision["constraints"]):
        refusals[constraint["reason"]] = refusals.get(constraint["reason"], 0) + 1
    return render_page(
        "kvpilot.agent.demo",
        "report.html.j2",
        charts=make_charts(data),
        data=data,
        outcome=outcome(data),
        tables=tables,
        tiles=tables[0][1][:NUM_TILES],
        cut_off=[(run["name"], text) for run in data["runs"] if (text := cut_off(run))],
        accounts=[(run["name"], accounts(run)) for run in data["runs"]],
        decisions=[decision for decision in decisions if decision["outcome"] in WRITTEN],
        num_decisions=len(decisions),
        refusals=sorted(refusals.items(), key=lambda item: -item[1]),
        quality=next((run["quality_loss"] for run in data["runs"] if any(run["quality_loss"].values())), {}),
    )
