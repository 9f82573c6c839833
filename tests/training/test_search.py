"""The search of training's own settings: a study that goes on, and a config that can be used."""

import optuna
import pytest

from kvpilot.agent.jobs.workers import StoppedError
from kvpilot.agent.training.config import TrainConfig, read_config
from kvpilot.agent.training.search import STORAGE, defaults, search, suggest
from kvpilot.agent.tune.storage import StudyError

from .conftest import SMALLEST


@pytest.fixture
def request_of_search(make_request):
    request = make_request(SMALLEST.with_(ppo={"steps": 16}))
    request.out.mkdir()
    return request


def test_the_first_trial_is_the_config_itself():
    config = TrainConfig(seeds=1).with_(environment={"churn_price": 0.002})
    assert suggest(optuna.trial.FixedTrial(defaults(config)), config) == config


def test_a_search_goes_on_and_its_best_config_can_be_trained(request_of_search, screen):
    request = request_of_search
    path, first = search(request, 1, screen, lambda: False)
    again, reward = search(request, 2, screen, lambda: False)
    assert again == path
    assert reward >= first
    config = read_config(path)
    assert config.seeds == request.config.seeds
    assert config.demonstrations == request.config.demonstrations
    study = optuna.load_study(study_name="train", storage=f"sqlite:///{request.out / STORAGE}")
    assert len(study.trials) >= 2
    assert reward == pytest.approx(max(trial.value for trial in study.trials if trial.value is not None))


def test_a_stopped_search_queues_its_trial_again(request_of_search, screen):
    request = request_of_search
    with pytest.raises(StoppedError, match="before a trial was done"):
        search(request, 1, screen, lambda: bool(list(request.out.rglob("episode-*.npz"))))
    path, _ = search(request, 1, screen, lambda: False)
    assert path.exists()


def test_a_study_for_another_config_is_refused(request_of_search, make_request, screen):
    with pytest.raises(StoppedError):
        search(request_of_search, 1, screen, lambda: True)
    with pytest.raises(StudyError, match="made with other base"):
        search(make_request(SMALLEST), 1, screen, lambda: True)
