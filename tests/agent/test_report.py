import json
import re

import pytest

from kvpilot.agent.control.controller import Decision, Outcome
from kvpilot.agent.demo.charts import make_charts
from kvpilot.agent.demo.command import DemoConfig, report_data
from kvpilot.agent.demo.load import Status, TurnResult
from kvpilot.agent.demo.recording import Recording
from kvpilot.agent.demo.report import render
from kvpilot.agent.demo.summary import accounts, cut_off, outcome, quantile, summarize
from kvpilot.agent.guard import Reason, Refusal
from kvpilot.engine.stats import StatsSnapshot

HOSTILE = "</script><script>alert(1)</script>"


def snapshot(t: float, *, hits: float = 0.0) -> StatsSnapshot:
    values = {
        ("requests_running", ()): 2.0,
        ("requests_waiting", ()): 1.0,
        ("pool_bytes", ()): 100.0,
        ("pool_free_bytes", ()): 50.0,
        ("prefix_query_tokens", ()): 100.0 * t,
        ("prefix_hit_tokens", ()): hits * 100.0 * t,
        ("generation_tokens", ()): 10.0 * t,
        ("pages", ("live", "bf16")): 3.0,
        ("pages", ("retained", "int4")): 4.0,
        ("pages", ("free", "bf16")): 9.0,
        ("page_bytes", ("live", "bf16")): 50.0,
        ("pool_capacity_tokens", ("bf16",)): 64.0,
        ("knob", ("kv_level",)): t,
        ("kv_quality_loss", ("int4",)): 0.004,
    }
    return StatsSnapshot(time=t, values=values, histograms={})


def result(sent: float, ttft: float) -> TurnResult:
    done = TurnResult(
        session=0, turn=1, sent=sent, status=Status.DONE, first_token=sent + ttft, answer_tokens=11
    )
    done.end = sent + ttft + 1.0
    return done


def recording(name: str, hits: float, ttft: float) -> Recording:
    made = Recording(name=name)
    for t in range(4):
        made.add(snapshot(float(t), hits=hits))
        for sample in made.samples[-1:]:
            sample["t"] = float(t)
    made.results = [result(0.5, ttft), result(1.5, ttft * 3)]
    made.seconds, made.finished = 4.0, True
    return made


@pytest.fixture
def data() -> dict:
    static, tuned = recording("static", 0.2, 1.0), recording("tuned", 0.8, 0.5)
    refusal = Refusal(Reason.STEP, "kv_level", "wanted 2")
    change = Decision(
        time=0.0, outcome=Outcome.APPLIED, reason=HOSTILE, changes={"kv_level": 1}, refusals=(refusal,)
    )
    tuned.decisions = [(1.0, change), (2.0, Decision(time=1.0, outcome=Outcome.KEPT))]
    made = report_data(DemoConfig(seconds_per_phase=1.0), [static, tuned], None)
    return json.loads(json.dumps(made, allow_nan=False))


def test_the_whole_runs_figures_and_ratios(data):
    rows = {row.label: row for row in summarize(data)[0][1]}
    hit = rows["Prefix cache hit rate"]
    assert (hit.static, hit.tuned, hit.ratio, hit.verdict) == ("20%", "80%", "4.00", "good")
    ttft = rows["Time to first token, median"]
    assert (ttft.static, ttft.tuned, ttft.ratio, ttft.verdict) == ("1.00 s", "0.50 s", "0.50", "good")
    assert rows["Output tokens/s"].static == "10"
    assert rows["Output tokens/s"].verdict == "even"


def test_a_worse_tuned_run_is_called_worse(data):
    data["runs"].reverse()
    rows = {row.label: row for row in summarize(data)[0][1]}
    assert rows["Time to first token, median"].verdict == "bad"
    assert rows["Prefix cache hit rate"].verdict == "bad"


def test_requests_count_in_the_phase_in_which_they_were_sent(data):
    answers = [rows[0].static for _, rows in summarize(data)[1:]]
    assert answers == ["1", "1", "0", "0", "-"]


def test_quantile_is_the_nearest_rank():
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([1.0, 2.0], 0.95) == 2.0
    assert quantile([], 0.5) is None


def test_every_chart_has_both_runs(data):
    charts = make_charts(data)
    assert len(charts) == 9
    for chart in charts:
        axes = {trace.get("xaxis", "x") for trace in chart["traces"]}
        assert axes == {"x", "x2"}, chart["id"]
        assert all(len(trace["x"]) == len(trace["y"]) > 0 for trace in chart["traces"])


def test_pool_by_level_leaves_out_free_pages(data):
    charts = {chart["id"]: chart for chart in make_charts(data)}
    tokens = {
        t["name"]: t["y"][0] for t in charts["pool-tokens"]["traces"] if t.get("stackgroup") == "static"
    }
    assert tokens == {"bf16": 3 * 32, "int4": 4 * 32}


def test_the_page_needs_nothing_else_and_escapes_what_it_is_given(data):
    data["problem"] = HOSTILE
    page = render(data)
    assert "alert(1)" in page
    assert HOSTILE not in page
    without_library = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", without_library)
    assert "kv_level&nbsp;&rarr;&nbsp;1" in page
    assert "step 1" in page


@pytest.mark.parametrize("keep", [0, 1])
def test_a_partial_report_is_still_a_page(keep):
    runs = [recording("static", 0.2, 1.0), Recording(name="tuned")] if keep else [
        Recording(name="static"), Recording(name="tuned")
    ]  # fmt: skip
    made = report_data(DemoConfig(), runs, "Interrupted")
    page = render(json.loads(json.dumps(made)))
    assert '<p class="problem">Interrupted</p>' in page


def test_every_request_is_accounted_for(data):
    run = data["runs"][0]
    run["results"][0].update(status="cut off", refusals=2)
    assert accounts(run) == "2 requests sent: 1 cut off, 1 done; 2 answers 429 or 503 were retried."


def test_the_outcome_names_what_got_better_worse_and_neither(data):
    text = outcome(data)
    better, rest = text.split("; ", 1)
    assert better.startswith(
        "Tuned against static - better: time to first token (median) 1.00 s \u2192 0.50 s"
    )
    assert "prefix cache hit rate 20% \u2192 80%" in better
    assert rest.startswith("within 5 %: answers completed")
    data["runs"].reverse()
    assert "worse: time to first token (median) 0.50 s \u2192 1.00 s" in outcome(data)


def test_a_figure_that_rises_from_nothing_has_a_verdict(data):
    for sample in data["runs"][0]["samples"]:
        sample["hit_tokens"] = 0.0
    hit = {row.label: row for row in summarize(data)[0][1]}["Prefix cache hit rate"]
    assert (hit.ratio, hit.verdict) == ("", "good")


def test_the_outcome_of_a_broken_run_is_over_the_phases_that_both_got_through(data):
    tuned = data["runs"][1]
    tuned.update(finished=False, seconds=1.4)
    text = outcome(data)
    assert "over the first 1 s" in text
    assert "time to first token (median) 1.00 s \u2192 0.50 s" in text
    tuned["results"][1]["ttft_seconds"] = 99.0  # sent in the second phase
    assert outcome(data) == text
    tables = dict(summarize(data))
    assert {row.label: row for row in tables["The first 1 s, which both runs got through"]}[
        "Time to first token, median"
    ].ratio == "0.50"
    assert all(row.ratio == "" for row in tables["burst"])
    tuned["seconds"] = 0.4
    assert outcome(data).startswith("Nothing to compare")
    assert all(row.ratio == "" for _, rows in summarize(data) for row in rows)


def test_requests_cut_off_are_counted_beside_the_figures_and_marked_in_the_chart(data):
    assert cut_off(data["runs"][0]) == ""
    assert "not in the latency figures" not in render(data)
    cut = data["runs"][0]["results"][1]
    cut.update(status="cut off", ttft_seconds=None, answer_seconds=None)
    counts = "1 of 2 (1 before their first token), under way for 2 s by then"
    assert cut_off(data["runs"][0]) == counts
    page = render(data)
    assert f"static {counts}" in page.split("In figures")[0]
    chart = {chart["id"]: chart for chart in make_charts(data)}["ttft"]
    marks = [t for t in chart["traces"] if t.get("marker", {}).get("symbol") == "triangle-up-open"]
    assert [(t["x"], t["y"]) for t in marks] == [([1.5], [2.5])]
    assert "Triangles" in chart["note"]


def test_every_knob_has_room_above_its_largest_value(data):
    layout = {chart["id"]: chart for chart in make_charts(data)}["knobs"]["layout"]
    high = max(run["samples"][-1]["knobs"]["kv_level"] for run in data["runs"])
    assert layout["yaxis"]["range"][1] >= 1.1 * high


def test_more_pages_held_is_neither_good_nor_bad(data):
    for sample in data["runs"][1]["samples"]:
        sample["pages"]["int4"] = 400.0
    pages = {row.label: row for row in summarize(data)[0][1]}["Most pages held at once"]
    assert (pages.static, pages.tuned, pages.verdict) == ("7", "403", "even")


def test_what_the_drawing_means_is_said_before_the_first_chart(data):
    before = render(data).split("<figure>")[0]
    assert "Dotted grey" in before
    assert "drain" in before
