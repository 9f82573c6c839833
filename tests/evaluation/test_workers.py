import importlib
from pathlib import Path

import pytest

from kvpilot.agent.jobs.workers import JobError, StoppedError, WorkerDiedError, Workers


@pytest.fixture
def kill_me(monkeypatch):
    """A job in a module that worker processes can import."""
    monkeypatch.syspath_prepend(Path(__file__).parent)
    return importlib.import_module("fatal_jobs").kill_me


def test_an_item_survives_the_death_of_its_worker(kill_me, tmp_path):
    items = ["a", str(tmp_path / "marker"), "b"]
    with Workers(kill_me, 2) as workers:
        assert workers.run(items) == items


def test_an_item_that_kills_its_workers_is_given_up_and_the_next_ones_run(kill_me):
    with Workers(kill_me, 1) as workers:
        (result,) = workers.run(["die"])
        assert isinstance(result, WorkerDiedError)
        assert "died 3 times with 'die'" in str(result)
        assert workers.run(["a"]) == ["a"]


def test_errors_of_ours_are_results_and_bugs_are_raised(kill_me):
    done = []
    with Workers(kill_me, 1) as workers:
        first, second = workers.run(["fail", "a"], on_done=lambda index, result: done.append(index))
        assert isinstance(first, JobError)
        assert str(first).startswith("kv_level=9 is invalid")
        assert second == "a"
        assert sorted(done) == [0, 1]
        with pytest.raises(ZeroDivisionError):
            workers.run(["bug"])


def test_a_stop_ends_what_is_under_way(kill_me):
    with Workers(kill_me, 1) as workers, pytest.raises(StoppedError, match="2 of 2 runs to go"):
        workers.run(["sleep", "sleep"], is_stopped=lambda: True)
