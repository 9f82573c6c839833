"""The page says what the figures say, and is one file."""

import json
import re
from dataclasses import replace

import pytest

from kvpilot.engine.config import Knobs
from kvpilot.env.replay.report import figure_rows, render
from kvpilot.env.replay.sim import replay_simulated


@pytest.fixture
def results(chats, replay):
    lossy = replace(replay, engine=replay.engine.with_(knobs=Knobs(max_batch=8, kv_level=2)))
    return replay_simulated(chats, replay), replay_simulated(chats, lossy)


def charts_of(page: str) -> list[dict]:
    found = re.search(r"for \(const chart of (.*)\)\n", page)
    assert found
    return json.loads(found[1])


def test_a_page_needs_nothing_else_and_shows_the_figures(results):
    page = render([("mine", results[0])])
    assert "<script src" not in page
    assert f"{100 * results[0].summary['hit_rate']:.1f} %" in page
    ids = [chart["id"] for chart in charts_of(page)]
    assert {"ttft-seconds", "hit-rate", "waiting", "state-0", "level-0"} <= set(ids)


def test_a_comparison_has_both_and_says_which_is_better(results):
    rows = {row.label: row for row in figure_rows(list(results))}
    hits = rows["Prefix hit rate"]
    assert len(hits.values) == 2
    assert hits.verdict == "good"
    assert hits.change.startswith("+")
    assert rows["Time to first token, p99"].verdict in ("good", "even", "bad")
    names = {
        trace.get("name")
        for chart in charts_of(render([("a", results[0]), ("b", results[1])]))
        for trace in chart["traces"]
    }
    assert {"a", "b"} <= names


def test_names_cannot_break_the_page(results):
    page = render([("</script><b>x", results[0])])
    assert "</script><b>" not in page


def test_results_without_windows_or_answers_are_shown(results):
    empty = replace(
        results[0],
        windows={},
        requests={name: [] for name in results[0].requests},
        summary={"requests": 0, "seconds": 0.0, "status": {}},
    )
    assert charts_of(render([("empty", empty)])) == []


def test_partial_results_say_so(results):
    assert "was stopped before its end" in render([("a", replace(results[0], is_partial=True))])
