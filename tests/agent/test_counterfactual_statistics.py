"""A counterfactual without a recording: what the statistics tell of the traffic, and traffic drawn from them."""

from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kvpilot.agent.control.audit import AuditLog, read_audit
from kvpilot.agent.control.config import CounterfactualSettings
from kvpilot.agent.counterfactual.loop import Counterfactual, Question, traffic_in_words
from kvpilot.agent.counterfactual.statistics import (
    TooLittleSeenError,
    TrafficStatistics,
    WatchedSource,
    moments,
)
from kvpilot.agent.counterfactual.traffic import (
    continued_share,
    draw_traffic,
    idle_times,
    preamble_tokens,
)
from kvpilot.engine.stats import StatsWindow
from kvpilot.env.replay.sim import SimReplay, make_simulation
from kvpilot.env.simulator.latency import load_profile
from kvpilot.env.slo import Slo
from kvpilot.exporter.source import NoHistoryError, ScrapeSource

PROFILE = Path(__file__).parents[1] / "faults" / "profile.json"
KNOBS = {"ttl_seconds": 60.0, "size_factor": 0.3, "max_batch": 16, "kv_level": 0}
SLO = {"ttft_p99_seconds": 2.0}
POOL_BYTES = 8 << 30
SPANS = 40
SEEN = {  # 2 requests a second; half of them go on, half of those within what pages live
    "arrivals": [[15.0, 30.0]] * SPANS,
    "prompt_tokens": {"mean": 600.0, "cv": 0.8},
    "output_tokens": {"mean": 60.0, "cv": 0.5},
    "hit_rate": 0.4,
    "hit_tokens": 240.0,
    "service_seconds": 2.0,
    "idle_bounds": [0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200],
    "reused": [0, 0, 0, 0, 0, 0, 4000, 4000, 0, 0, 0, 0, 0, 0],
    "released": [0, 0, 0, 0, 0, 0, 0, 0, 8000, 0, 0, 0, 0, 0],
    "more_idle_pages": 0.0,
}


def draw(**changes):
    options = {"page_size": 32, "max_tokens": 16_000, "warm_up": 1.0}
    return draw_traffic(SEEN, **{**options, **changes})


def test_drawn_traffic_has_the_rates_and_lengths_that_were_seen():
    trace = draw()
    since = 15.0 * SPANS
    late = trace.arrival_seconds >= since
    assert late.sum() == pytest.approx(30 * SPANS, rel=0.1)
    assert trace.prompt_tokens[late].mean() == pytest.approx(600, rel=0.15)
    assert trace.output_tokens[late].mean() == pytest.approx(60, rel=0.1)
    assert (trace.turn[late] > 1).mean() == pytest.approx(continued_share(SEEN), abs=0.08)


def test_a_turn_repeats_the_one_before_and_its_answer():
    trace = draw()
    row = int(np.flatnonzero(trace.successor >= 0)[0])
    successor = int(trace.successor[row])
    before = trace.blocks_of(row)
    assert (trace.blocks_of(successor)[: len(before)] == before).all()
    assert trace.prompt_tokens[successor] > trace.prompt_tokens[row] + trace.output_tokens[row]


def test_hits_on_pages_in_use_stand_for_a_preamble_that_all_share():
    assert (
        preamble_tokens(SEEN, 32) == 0
    )  # 8000 idle pages were hit: more than 240 tokens for each of 1200 requests
    hot = {**SEEN, "hit_tokens": 300.0, "reused": [0] * 6 + [1000, 1000] + [0] * 6}
    shared = preamble_tokens(hot, 32)
    assert shared == 224  # 300 - 32 * 2000 / 1200, in whole pages
    trace = draw_traffic(hot, page_size=32, max_tokens=16_000, warm_up=1.0)
    first, other = trace.blocks_of(0), trace.blocks_of(1)
    assert (first[:7] == other[:7]).all()
    assert trace.prompt_tokens.min() > shared
    since = trace.arrival_seconds >= 15.0 * SPANS
    assert trace.prompt_tokens[since].mean() == pytest.approx(600, rel=0.1)


def test_the_same_seed_draws_the_same():
    one, same, other = draw(), draw(), draw(seed=1)
    assert (one.prompt_tokens == same.prompt_tokens).all()
    assert len(one) != len(other) or (one.prompt_tokens != other.prompt_tokens).any()


def test_rates_follow_what_was_seen():
    spans = [[15.0, 5.0]] * 20 + [[15.0, 55.0]] * 20
    trace = draw_traffic({**SEEN, "arrivals": spans}, page_size=32, max_tokens=16_000, warm_up=1.0)
    middle = 600.0 + 300.0
    calm = ((trace.arrival_seconds >= 600.0) & (trace.arrival_seconds < middle)).sum()
    assert calm == pytest.approx(100, rel=0.35)
    assert (trace.arrival_seconds >= middle).sum() == pytest.approx(1100, rel=0.15)


def test_pages_that_were_released_may_still_have_been_hit():
    """Half were hit before the others were released: of those the rate goes on, but not for ever."""
    idle, share = idle_times(SEEN, 600.0)
    assert 0.5 < share < 1.0
    drawn = idle.draw(4000, np.random.default_rng(0))
    assert drawn.min() >= 10.0
    assert drawn.max() <= 2400.0
    never = {**SEEN, "reused": [0] * 14}
    assert idle_times(never, 600.0)[1] == 0.0


def test_the_spread_of_lengths_comes_out_of_sums():
    rng = np.random.default_rng(3)
    lengths = [rng.gamma(4.0, 50.0, int(n)) for n in rng.integers(5, 30, 400)]
    seen = moments([(len(some), float(some.sum())) for some in lengths])
    assert seen["mean"] == pytest.approx(200, rel=0.03)
    assert seen["cv"] == pytest.approx(0.5, rel=0.1)


@pytest.fixture(scope="module")
def snapshots():
    """Of a simulated engine under drawn traffic: what a scrape every 15 s would have given."""
    profile = load_profile(str(PROFILE))
    config = profile.engine_config(pool_bytes=POOL_BYTES, max_batch_ceiling=64)
    replay = SimReplay(profile=profile, engine=config, slo=Slo())
    simulation = make_simulation(draw(page_size=config.page_size), replay)
    taken = []
    while simulation.clock.now < 1200.0 and not simulation.is_done:
        simulation.run(until=15.0 * (len(taken) + 1))
        taken.append(simulation.engine.snapshot())
    return taken


@pytest.fixture
def statistics(snapshots):
    statistics = TrafficStatistics(600.0)
    waiting = iter(snapshots)
    source = WatchedSource(ScrapeSource(lambda: next(waiting)), statistics)
    for _ in snapshots:
        with suppress(NoHistoryError):  # the first
            source.window(60.0)
    return statistics


def test_what_is_seen_is_what_was_drawn(statistics):
    seen = statistics.describe()
    assert sum(seconds for seconds, _ in seen["arrivals"]) == pytest.approx(600, abs=16)
    assert sum(count for _, count in seen["arrivals"]) == pytest.approx(1200, rel=0.1)
    assert seen["prompt_tokens"]["mean"] == pytest.approx(600, rel=0.15)
    assert continued_share(seen) == pytest.approx(continued_share(SEEN), abs=0.12)


def test_a_restart_begins_anew_and_too_little_is_said(snapshots):
    statistics = TrafficStatistics(600.0)
    with pytest.raises(TooLittleSeenError, match="0 observations"):
        statistics.describe()
    for before, after in pairwise(snapshots):
        statistics.note(StatsWindow(start=before, end=after))
    statistics.describe()
    statistics.note(StatsWindow(start=snapshots[-1], end=snapshots[0]))
    with pytest.raises(TooLittleSeenError, match="1 observations"):
        statistics.describe()


def test_an_engine_that_lacks_the_histograms_is_said(snapshots):
    import dataclasses

    bare = dataclasses.replace(snapshots[0], histograms={})
    statistics = TrafficStatistics(600.0)
    statistics.note(StatsWindow(start=bare, end=bare))
    with pytest.raises(TooLittleSeenError, match="page_reuse_gap_seconds"):
        statistics.describe()


class Shown:
    def __init__(self) -> None:
        self.results = []

    def set_counterfactual(self, traffic, proposed, present) -> None:
        self.results.append((traffic, dict(proposed), dict(present)))


def test_a_worse_proposal_is_seen_to_be_worse_and_the_answer_is_called_an_estimate(
    statistics, tmp_path, wait_until
):
    settings = CounterfactualSettings(
        statistics=True,
        profile=str(PROFILE),
        window_seconds=600.0,
        every_seconds=0.1,
        timeout_seconds=900.0,
    )
    shown = Shown()
    counterfactual = Counterfactual(settings, SLO, AuditLog(tmp_path / "audit.jsonl"), shown)
    counterfactual._statistics = statistics
    answer = counterfactual.simulate(Question(KNOBS, {**KNOBS, "max_batch": 2}, float(POOL_BYTES)))
    assert answer["proposed"]["e2e_mean_seconds"] > answer["present"]["e2e_mean_seconds"]
    assert answer["present"]["hit_rate"] == pytest.approx(answer["hit_rate_measured"], abs=0.1)
    assert "an estimate" in traffic_in_words("estimated", answer)
    with counterfactual:
        counterfactual._question = Question(KNOBS, KNOBS, float(POOL_BYTES))
        counterfactual._asked.set()
        wait_until(lambda: shown.results, seconds=60)
    traffic, proposed, present = shown.results[0]
    assert traffic == "estimated"
    assert proposed == present
    (line,) = {line.kind: line.record for line in read_audit(tmp_path / "audit.jsonl")}.values()
    assert (line["kind"], line["traffic"]) == ("counterfactual", "estimated")
