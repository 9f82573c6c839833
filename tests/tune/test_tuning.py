import pytest

from kvpilot.agent.evaluation.runs import Run
from kvpilot.agent.jobs.workers import StoppedError
from kvpilot.agent.policies.spec import static_spec
from kvpilot.agent.tune.charts import make_charts, render
from kvpilot.agent.tune.command import portfolio_sheet, rule_in_words, run_tune, scores_sheet
from kvpilot.agent.tune.config import Effort, TuneConfig
from kvpilot.agent.tune.portfolio import segments
from kvpilot.agent.tune.result import read_tuned
from kvpilot.agent.tune.tuning import Tuner, make_workers
from kvpilot.engine.errors import KVPilotError

EFFORT = Effort(trials=8, regime_trials=2, rule_trials=4, episodes=1, short_seconds=20.0, batch=4)


@pytest.fixture
def config(short, tmp_path) -> TuneConfig:
    busy = short.with_(name="busy", order=("busy",))
    return TuneConfig(
        workloads={"small": short, "busy": busy},
        label="test",
        out=tmp_path / "tuned.json",
        storage=str(tmp_path / "tuned.db"),
        effort=EFFORT,
        workers=1,
        cache=tmp_path / "runs",
    )


def test_everything_is_found_and_written_and_nothing_is_run_twice(config, capsys):
    assert run_tune(config) == 0
    tuned = read_tuned(config.out)
    assert tuned.portfolio[0] == tuned.static_best
    assert set(tuned.scores) == {"small", "busy"}
    for scores in tuned.scores.values():
        assert scores["static-best-here"] >= scores["static-best"] > scores["default"]
    mean = sum(scores["static-best"] for scores in tuned.scores.values()) / 2
    assert tuned.static_best.score == pytest.approx(mean)
    rule = sum(scores["hysteresis"] for scores in tuned.scores.values()) / 2
    assert rule >= mean - 1e-9  # the first rule tried never switches
    page = config.out.with_suffix(".html").read_text()
    assert "history-all" in page
    assert "importance-all" not in page  # too few trials to say what mattered
    kept = {path: path.stat().st_mtime_ns for path in config.cache.iterdir()}
    assert run_tune(config) == 0
    assert {path: path.stat().st_mtime_ns for path in config.cache.iterdir()} == kept
    again = read_tuned(config.out)
    assert (again.static_best, again.portfolio, again.hysteresis) == (
        tuned.static_best,
        tuned.portfolio,
        tuned.hysteresis,
    )
    assert "What it is worth" in capsys.readouterr().out


def test_what_was_known_when_it_was_stopped_becomes_the_result(config):
    done = 0

    def on_trial() -> None:
        nonlocal done
        done += 1

    with make_workers(config) as workers:
        tuning = Tuner(config, workers, is_stopped=lambda: done >= 8, on_trial=on_trial).run()
    assert tuning.stopped
    assert tuning.result.provenance["is_partial"]
    assert len(tuning.result.portfolio) >= 1
    assert tuning.result.hysteresis.calm == tuning.result.static_best.knobs
    assert "no switching" in rule_in_words(tuning.result)
    assert scores_sheet(tuning).rows[0][0] == "small"
    assert len(portfolio_sheet(tuning.result).rows) == len(tuning.result.portfolio)
    assert "stopped before its end" in render(tuning.result, tuning.studies, [scores_sheet(tuning)])
    with make_workers(config) as workers:
        whole = Tuner(config, workers, is_stopped=lambda: False, on_trial=on_trial).run()
    assert not whole.stopped
    assert whole.result.provenance["trials"]["busy"] == 2


def test_stopped_before_anything_is_known_there_is_no_result(config):
    with make_workers(config) as workers, pytest.raises(StoppedError):
        Tuner(config, workers, is_stopped=lambda: True, on_trial=lambda: None).run()
    assert not config.out.exists()


def test_charts_show_every_study_and_the_front(config):
    with make_workers(config) as workers:
        tuning = Tuner(config, workers, is_stopped=lambda: False, on_trial=lambda: None).run()
    charts = {chart["id"]: chart for chart in make_charts(tuning.studies)}
    assert {"history-all", "history-small", "history-busy", "slice-kv_level", "pareto-quality_loss"} <= set(
        charts
    )
    front = charts["pareto-quality_loss"]["traces"][0]
    assert front["y"] == sorted(front["y"])  # more hits cost more quality, or the point were not on it


def test_segments_are_phases_and_add_up_to_the_episode(workload):
    episode = workload.draw(3)
    results = [[Run(episode=episode, policy=static_spec({"kv_level": level}))()] for level in (0, 2)]
    rewards, families, regimes = segments(results)
    assert rewards.shape == (2, len(families)) == (2, len(regimes))
    assert set(families) == {"small"}
    lengths = [results[0][0].windows["phase"].count(regime.split("/")[1]) for regime in regimes]
    if len(set(regimes)) == len(regimes):
        assert rewards[0] @ lengths / sum(lengths) == pytest.approx(results[0][0].reward)


def test_workloads_whose_engines_differ_are_tuned_apart(config, short):
    other = short.with_(name="busy", profile="h200-llama3-8b", page_size=512, pool_bytes=60_000_000_000)
    mixed = TuneConfig(**{**vars(config), "workloads": {"small": short, "busy": other}})
    with make_workers(mixed) as workers, pytest.raises(KVPilotError, match="other bounds"):
        Tuner(mixed, workers, is_stopped=lambda: False, on_trial=lambda: None)
