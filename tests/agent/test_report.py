import json
import re

import pytest

from kvpilot.agent.charts import make_charts
from kvpilot.agent.controller import Decision, Outcome
from kvpilot.agent.demo import DemoConfig, report_data
from kvpilot.agent.guard import Reason, Refusal
from kvpilot.agent.load import Status, TurnResult
from kvpilot.agent.recording import Recording
from kvpilot.agent.report import render
from kvpilot.agent.summary import accounts, quantile, summarize
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
