"""The page says what the figures say, and is one file."""

import json
import re
from dataclasses import replace
from html import unescape
from pathlib import Path

import pytest

from kvpilot.engine.config import Knobs
from kvpilot.env.pages.figure import MAX_TICKS, log_axis
from kvpilot.env.replay.charts import color_of
from kvpilot.env.replay.compare import describe, names_of, warnings_of
from kvpilot.env.replay.report import figure_rows, render
from kvpilot.env.replay.sim import replay_simulated
from kvpilot.env.slo import Slo


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


def test_every_one_of_many_results_has_its_own_colour(results):
    assert len({color_of(number) for number in range(40)}) == 40
    page = render([(f"r{number}", results[0]) for number in range(6)])
    assert all(f'style="background: {color_of(number)}"' in page for number in range(6))
    lines = [
        trace["line"]["color"]
        for chart in charts_of(page)
        if chart["id"] == "hit-rate"
        for trace in chart["traces"]
    ]
    assert lines == [color_of(number) for number in range(6)]


def test_the_header_says_in_words_what_was_replayed(results):
    text = describe(results[1])
    assert "kv_level=2" in text
    assert "eviction lru" in text
    assert "GiB in pages of 8 tokens" in text
    assert f"of {len(results[1].requests['row'])} requests" in text
    assert text in render([("a", results[0]), ("b", results[1])])
    large = {**results[0].config, "engine": {**results[0].config["engine"], "pool_bytes": 100 << 30}}
    assert "pool of 100 GiB" in describe(replace(results[0], config=large))


def test_other_traffic_and_another_slo_are_warned_of(results, chats, replay):
    named = [("a", results[0]), ("b", results[1])]
    assert warnings_of(named) == []
    coarse = replay_simulated(chats, replace(replay, engine=replay.engine.with_(page_size=16)))
    assert warnings_of([named[0], ("pages", coarse)]) == []
    other = replace(results[1], trace={**results[1].trace, "name": "other.jsonl"})
    (line,) = warnings_of([*named, ("c", other)])
    assert line.startswith("c replays other traffic than a")
    assert line in unescape(render([*named, ("c", other)]))
    strict = replace(results[1], slo=Slo(ttft_seconds=0.1))
    assert "another SLO" in warnings_of([named[0], ("strict", strict)])[0]


def test_equal_stems_are_told_apart_by_their_folders():
    assert names_of([Path("a/x.json"), Path("b/x.json"), Path("c/y.json")]) == ["a/x", "b/x", "y"]
    assert names_of([Path("a/c/x.json"), Path("b/c/x.json")]) == ["a/c/x", "b/c/x"]
    assert names_of([Path("x.json"), Path("y.json")]) == ["x", "y"]
    assert names_of([Path("x.json"), Path("y.json"), Path("x.json")]) == ["x", "y", "x (2)"]
    assert names_of([Path("/x.json"), Path("/y/x.json")]) == ["x", "y/x"]


def test_partial_results_say_so(results):
    assert "was stopped before its end" in render([("a", replace(results[0], is_partial=True))])


def test_no_loss_beside_pages_stepped_down_is_explained(results):
    def loss(pages_read):
        windows = {**results[0].windows, "pages_read": [pages_read]}
        summary = {**results[0].summary, "quality_loss": 0.0, "stepped_down": {"int8": 0, "int4": 7}}
        rows = figure_rows([replace(results[0], windows=windows, summary=summary)])
        return {row.label: row for row in rows}["Quality loss, mean KL per token"].values

    assert loss({"bf16": 5, "int8": 0, "int4": 0}) == ["0: no stepped-down page was read"]
    assert loss({"bf16": 5, "int8": 0, "int4": 1}) == ["0"]


@pytest.mark.parametrize(
    ("low", "high", "texts"),
    [
        (0.06, 0.9, ["0.05", "0.1", "0.2", "0.5", "1"]),
        (0.0035, 0.0037, ["0.002", "0.005"]),
        (1.0, 1.0, ["1", "2"]),
        (30, 1500, ["20", "50", "100", "200", "500", "1000", "2000"]),
    ],
)
def test_log_axes_have_ticks_in_full_that_enclose_the_data(low, high, texts):
    axis = log_axis(low, high)
    assert axis["ticktext"] == texts
    assert [float(text) for text in texts] == axis["tickvals"]
    assert 10 ** axis["range"][0] < low
    assert 10 ** axis["range"][1] > high


def test_log_axes_over_many_decades_have_a_tick_each():
    axis = log_axis(0.001, 5000)
    assert axis["ticktext"] == ["0.001", "0.01", "0.1", "1", "10", "100", "1000"]
    assert len(axis["ticktext"]) <= MAX_TICKS


def test_every_log_axis_of_a_page_has_its_own_ticks(results):
    layouts = [chart["layout"] for chart in charts_of(render([("a", results[0]), ("b", results[1])]))]
    axes = [axis for layout in layouts for axis in (layout["xaxis"], layout["yaxis"])]
    logarithmic = [axis for axis in axes if axis.get("type") == "log"]
    assert len(logarithmic) == 4
    assert all(len(axis["ticktext"]) >= 2 for axis in logarithmic)
