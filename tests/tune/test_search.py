import errno
import socket
from typing import Any

import optuna
import pytest

from kvpilot.agent.evaluation.runs import KeepingJob, Run
from kvpilot.agent.jobs.workers import StoppedError, WorkerDiedError
from kvpilot.agent.policies.spec import static_spec
from kvpilot.agent.tune.figures import Limits
from kvpilot.agent.tune.ladder import Ladder
from kvpilot.agent.tune.search import Search, make_pruner
from kvpilot.agent.tune.space import SearchSpace
from kvpilot.agent.tune.storage import StudyError, keeping, open_storage, open_study, take_back_lost
from kvpilot.engine.config import knob_bounds
from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.env.tuning.rollout import EpisodeResult


class InProcess:
    """Runs without processes. `broken` says for which knobs it raises what, `stop_after` how many runs it does."""

    def __init__(self, broken=lambda knobs: None, stop_after=10_000) -> None:
        self.runs: list[Run] = []
        self._broken, self._stop_after = broken, stop_after

    def run(self, items, *, on_done=lambda index, result: None, is_stopped=lambda: False):
        results = []
        for index, run in enumerate(items):
            if len(self.runs) >= self._stop_after:
                raise StoppedError("stopped")
            self.runs.append(run)
            results.append(self._broken(run.policy.config["knobs"]) or KeepingJob(None)(run))
            on_done(index, results[-1])
        return results


@pytest.fixture
def ladder(short) -> Ladder:
    return Ladder(episodes=(short.draw(0), short.draw(1)), short_seconds=20.0)


@pytest.fixture
def make_search(tmp_path, ladder):
    memory: dict[str, optuna.storages.InMemoryStorage] = {}

    def make(
        workers: Any = None, storage="", limits=None, several=False, inputs=None, seed=0, batch=4
    ) -> Search:
        """`storage`: one of FILES, or the name of one in memory."""
        directions: Any = ["maximize", "minimize", "minimize"] if several else ["maximize"]
        no_processes: Any = InProcess()
        if storage in FILES:
            kept = open_storage(str(tmp_path / storage))
        else:
            kept = memory.setdefault(storage, optuna.storages.InMemoryStorage())
        study = open_study(kept, "tune/all", directions, inputs or {"reward": 1})
        study.pruner = make_pruner()
        bounds = knob_bounds(ladder.episodes[0].engine_config())
        space = SearchSpace(lowest_batch=1, ttl_seconds=(1.0, 60.0))
        return Search(
            study,
            lambda trial: static_spec(space.suggest(trial, bounds)),
            ladder,
            workers or no_processes,
            limits=limits or Limits(),
            seed=seed,
            batch=batch,
            is_stopped=lambda: False,
        )

    return make


FOREVER = float("inf")
FILES = ("study.db", "study.journal")


def values_of(search: Search) -> list[tuple]:
    trials = search.study.get_trials(
        states=(optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED)
    )
    return [(trial.state.name, trial.params, trial.value) for trial in trials]


def test_half_of_the_settings_are_given_up_after_the_short_runs(make_search):
    workers = InProcess()
    search = make_search(workers)
    search.run(16, FOREVER)
    pruned = search.study.get_trials(states=(optuna.trial.TrialState.PRUNED,))
    assert search.num_done == 16
    assert 2 <= len(pruned) <= 8
    full = [run for run in workers.runs if run.until_seconds is None]
    short = [run for run in workers.runs if run.until_seconds == 20.0]
    assert len(short) == 32
    assert len(full) < 2 * (16 - len(pruned)) + len(pruned) + 1
    best = search.best(1)[0]
    assert best.value == max(trial.value for trial in search.best(16))


@pytest.mark.parametrize("storage", FILES)
def test_a_study_goes_on_as_it_would_have(make_search, storage):
    whole = make_search()
    whole.run(12, FOREVER)  # in memory
    make_search(storage=storage).run(8, FOREVER)
    resumed = make_search(storage=storage)
    resumed.run(12, FOREVER)
    assert values_of(resumed) == values_of(whole)


def test_a_stop_queues_what_was_under_way(make_search):
    search = make_search(InProcess(stop_after=11))
    with pytest.raises(StoppedError):
        search.run(12, FOREVER)
    failed = search.study.get_trials(states=(optuna.trial.TrialState.FAIL,))
    waiting = search.study.get_trials(states=(optuna.trial.TrialState.WAITING,))
    assert len(failed) == len(waiting) == 4
    resumed = make_search()
    resumed.run(4, FOREVER)
    assert [params for _, params, _ in values_of(resumed)] == [trial.params for trial in failed]


def test_after_a_stop_the_same_is_found_as_without(make_search):
    whole = make_search(storage="whole")
    whole.run(12, FOREVER)
    with pytest.raises(StoppedError):
        make_search(InProcess(stop_after=21)).run(12, FOREVER)
    resumed = make_search()
    resumed.run(12, FOREVER)
    assert resumed.study.get_trials(states=(optuna.trial.TrialState.FAIL,))
    assert [told[1:] for told in values_of(resumed)] == [told[1:] for told in values_of(whole)]


@pytest.mark.parametrize("limits", [{"max_quality_loss": -1.0}, {"min_goodput": 2.0}])
def test_limits_that_nothing_can_keep_to_are_refused(limits):
    with pytest.raises(ConfigError, match=next(iter(limits))):
        Limits(**limits)


def test_a_full_disk_is_an_error_in_words(tmp_path):
    with (
        pytest.raises(KVPilotError, match=r"tuned\.db cannot be written: No space left.*goes on"),
        keeping("tuned.db"),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_trials_of_a_killed_process_are_taken_back(make_search):
    search = make_search()
    trial = search.study.ask()
    trial.suggest_float("size_factor", 0.0, 1.0)
    trial.set_user_attr("worker", f"{socket.gethostname()}:4194305")  # above any process number
    other = search.study.ask()
    other.set_user_attr("worker", "elsewhere:1")
    assert take_back_lost(search.study) == 1
    states = [one.state.name for one in search.study.get_trials()]
    assert states == ["FAIL", "RUNNING", "WAITING"]


def test_a_setting_that_the_engine_fails_with_is_told_as_bad(make_search):
    deep = lambda knobs: KVPilotError("the engine failed") if knobs["kv_level"] == 2 else None  # noqa: E731
    search = make_search(InProcess(broken=deep))
    search.run(8, FOREVER)
    told = {trial.params["kv_level"]: trial for trial in search.best(8)}
    assert told[2].value == -1.0
    assert told[2].user_attrs["failure"] == "the engine failed"
    assert told[0].value > -1.0


def test_a_setting_whose_workers_die_fails_and_says_nothing(make_search):
    search = make_search(
        InProcess(broken=lambda knobs: WorkerDiedError("killed") if knobs["kv_level"] == 2 else None)
    )
    search.run(6, FOREVER)
    failed = search.study.get_trials(states=(optuna.trial.TrialState.FAIL,))
    assert failed
    assert all(trial.params["kv_level"] == 2 for trial in failed)
    assert search.num_done == 6


def test_limits_come_before_reward(make_search):
    free = make_search(storage="free")
    free.run(10, FOREVER)
    losses = sorted(trial.user_attrs["figures"]["quality_loss"] for trial in free.best(10))
    assert losses[0] < losses[-1]
    bound = make_search(limits=Limits(max_quality_loss=losses[0]))
    bound.run(10, FOREVER)
    assert bound.best(1)[0].user_attrs["figures"]["quality_loss"] <= losses[0]


def test_several_objectives_are_searched_without_pruning(make_search):
    search = make_search(several=True)
    search.run(6, FOREVER)
    assert len(search.best(6)) == 6
    assert all(len(trial.values) == 3 for trial in search.study.best_trials)


def test_a_study_of_other_inputs_or_another_version_is_refused(make_search, tmp_path):
    search = make_search(inputs={"reward": 1, "workloads": "a"})
    with pytest.raises(StudyError, match="other workloads: name another study"):
        make_search(inputs={"reward": 1, "workloads": "b"})
    with pytest.raises(StudyError, match="other directions"):
        make_search(inputs={"reward": 1, "workloads": "a"}, several=True)
    search.study.set_user_attr("kvpilot_study", 99)
    with pytest.raises(StudyError, match="kvpilot_study=99 is of another version"):
        make_search(inputs={"reward": 1, "workloads": "a"})


def test_storages_that_are_none_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no folder"):
        open_storage(str(tmp_path / "missing" / "study.db"))
    (tmp_path / "text.db").write_text("not a database, but long enough to be taken for one" * 30)
    with pytest.raises(StudyError, match=r"text\.db"):
        open_storage(str(tmp_path / "text.db"))
    with pytest.raises(StudyError, match="nonsense"):
        open_storage("nonsense://host/name")


def test_results_are_in_the_order_of_the_episodes(ladder):
    results = [
        EpisodeResult(policy="", episode=episode.to_json(), windows={}, summary={})
        for episode in ladder.episodes
    ]
    assert ladder.in_order(results[::-1]) == results
