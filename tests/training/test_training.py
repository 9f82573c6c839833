"""The whole of `autotune train` on small traffic: what it leaves, how it is interrupted, resumed and refused."""

import json
import signal
from dataclasses import replace

import numpy as np
import pytest

from kvpilot.agent.jobs.workers import StoppedError
from kvpilot.agent.policies.exported import load_exported
from kvpilot.agent.training.command import only_one, run_train
from kvpilot.agent.training.config import read_config
from kvpilot.agent.training.demonstrations import Demonstrations
from kvpilot.agent.training.errors import FolderError, TrainingError
from kvpilot.agent.training.rounds import demonstrate
from kvpilot.agent.training.seeds import Point
from kvpilot.agent.training.training import Trained, open_folder, train
from kvpilot.agent.training.validation import Score
from kvpilot.agent.tune.result import TunedFormError
from kvpilot.env.traces.trace import TraceError
from kvpilot.env.tuning.rollout import run_episode

from .conftest import SMALLEST


@pytest.fixture
def run(screen):
    """Trains; `is_stopped` is asked often."""

    def go(request, *, resume=False, is_stopped=lambda: False):
        open_folder(request, resume=resume)
        return train(request, screen, is_stopped)

    return go


@pytest.fixture
def count_down():
    """True from its n-th question on."""

    def make(number):
        asked = iter(range(number))
        return lambda: next(asked, None) is None

    return make


def test_a_training_leaves_a_policy_that_runs_and_says_where_it_comes_from(make_request, run, workload):
    request = make_request()
    done = run(request)
    assert done.is_complete
    assert [point.steps for point in done.seeds[0]] == [0, 16, 32]
    policy = load_exported(done.policy)
    described = policy.description
    assert described.provenance["workloads"] == request.hashes
    assert described.evaluation["reward"] == done.score.reward == max(p.reward for p in done.seeds[0])
    settings = described.actions.to_json()["settings"]
    assert [setting["name"] for setting in settings] == ["level-1", "level-0", "level-2"]
    assert read_config(request.out / "config.toml") == SMALLEST
    report = json.loads((request.out / "training.json").read_text())
    assert report["policy_hash"] == policy.hash
    assert set(report["baselines"]) == {"static-best", "hysteresis"}
    assert list((request.out / "tensorboard").rglob("events.*"))
    episode = workload.with_(split="validation").draw(500_000)
    result = run_episode(episode, policy, decide_every=1)
    assert result.reward == pytest.approx(done.score.reward)
    lows, highs = described.envelope_low, described.envelope_high
    assert all(0 <= low <= high <= 1 for low, high in zip(lows, highs, strict=True))
    assert max(highs) > 0.1


def test_labels_are_rewards_of_actions_and_learning_rounds_differ(make_request, screen):
    data = demonstrate(make_request(), screen, lambda: False)
    assert set(data.round.tolist()) == {0, 1}
    assert data.num_labelled == pytest.approx(len(data) / 2, abs=4)
    labelled = data.values[~(data.values != data.values)]
    assert labelled.max() <= 1.0
    assert labelled.std() > 0.005
    assert len(data.episodes()) == 4


def test_the_same_config_gives_the_same_demonstrations_and_clone(make_request, run):
    config = SMALLEST.with_(ppo={"steps": 0})
    one, other = (run(make_request(config, out)) for out in ("one", "other"))
    assert one.seeds == other.seeds
    first, second = (
        Demonstrations.join([Demonstrations.load(path) for path in sorted(out.rglob("episode-*.npz"))])
        for out in (make_request(config, "one").out, make_request(config, "other").out)
    )
    assert (first.features == second.features).all()


def test_stopped_while_labelling_it_resumes_and_labels_no_episode_twice(
    make_request, run, count_down, monkeypatch
):
    request = make_request()
    with pytest.raises(StoppedError):
        run(request, is_stopped=lambda: bool(list(request.out.rglob("episode-*.npz"))))
    kept = {path: path.stat().st_mtime_ns for path in request.out.rglob("episode-*.npz")}
    assert kept
    done = run(request, resume=True)
    assert done.is_complete
    assert {path: path.stat().st_mtime_ns for path in kept} == kept


def test_stopped_in_ppo_it_exports_the_best_so_far_and_resumes(make_request, run):
    request = make_request(SMALLEST.with_(ppo={"steps": 64}))
    points = request.out / "seed-0" / "points.json"
    partial = run(request, is_stopped=lambda: points.exists() and len(json.loads(points.read_text())) > 1)
    assert not partial.is_complete
    assert load_exported(partial.policy).description.evaluation["reward"] == partial.score.reward
    done = run(request, resume=True)
    assert done.is_complete
    steps = [point.steps for point in done.seeds[0]]
    assert steps == sorted(set(steps))
    assert steps[-1] == 64
    assert done.seeds[0][: len(partial.seeds[0])] == partial.seeds[0]


def test_killed_while_it_validated_the_end_of_ppo_it_validates_that_and_is_done(make_request, run):
    request = make_request()
    whole = run(request)
    path = request.out / "seed-0" / "points.json"
    path.write_text(json.dumps(json.loads(path.read_text())[:-1]))  # the checkpoint is written before
    done = run(request, resume=True)
    assert done.is_complete
    assert [point.reward for point in done.seeds[0]] == [point.reward for point in whole.seeds[0]]


def test_traces_too_short_to_split_are_refused_before_anything_is_written(make_request, monkeypatch):
    monkeypatch.setattr("kvpilot.env.tuning.sessions.MIN_SESSIONS", 1000)
    request = make_request()
    with pytest.raises(TraceError, match="too short to split"):
        run_train(request, resume=False)
    assert not (request.out / "config.toml").exists()


def test_stopped_between_two_seeds_it_is_not_complete(make_request, run):
    request = make_request(SMALLEST.with_(seeds=2, ppo={"steps": 0}))
    partial = run(request, is_stopped=lambda: (request.out / "seed-0" / "best" / "policy.json").exists())
    assert list(partial.seeds) == [0]
    assert not partial.is_complete
    assert run(request, resume=True).is_complete


def test_several_seeds_are_joined_to_a_network_that_averages_them(make_request, run, workload):
    done = run(make_request(SMALLEST.with_(seeds=2, ppo={"steps": 0})))
    assert done.joined is not None
    out = done.policy.parent
    policies = [load_exported(out / name) for name in ("seed-0/best", "seed-1/best", "joined")]
    inputs = np.random.default_rng(0).uniform(size=(20, policies[0].network.num_inputs)).astype(np.float32)
    one, other, joined = ([policy.network.logits(row) for row in inputs] for policy in policies)
    assert np.allclose(np.add(one, other) / 2, joined, atol=1e-5)
    assert not np.allclose(one, other, atol=1e-3)
    exported = load_exported(done.policy)
    assert exported.description.evaluation["reward"] == done.score.reward


def test_the_joined_network_is_kept_where_it_beats_what_needs_no_training(tmp_path):
    def trained(joined):
        baselines = {"static-best": Score(0.37, {}, 0.0), "hysteresis": Score(0.38, {}, 0.0)}
        point = Point(steps=0, reward=0.41, by_workload={}, changes_per_hour=0.0)
        seeds = {3: [point], 4: [replace(point, reward=0.40), replace(point, reward=0.42)]}
        kept = None if joined is None else Score(joined, {}, 0.0)
        return Trained(baselines=baselines, seeds=seeds, joined=kept, is_complete=True, policy=tmp_path)

    assert trained(0.39).exported is None
    assert trained(0.39).score.reward == 0.39
    assert trained(0.375).exported == 4
    assert trained(None).score.reward == 0.42


def test_a_folder_that_cannot_be_written_is_named(make_request, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match="file/out cannot be written"):
        run_train(make_request(out="file/out"), resume=False)


def test_two_trainings_do_not_share_a_folder(make_request):
    request = make_request()
    request.out.mkdir()
    with only_one(request.out), pytest.raises(FolderError, match="in use by another training"):
        run_train(request, resume=False)
    assert run_train(request, resume=False) == 0


def test_ctrl_c_ends_in_order(make_request, monkeypatch):
    request = make_request(SMALLEST.with_(ppo={"steps": 100_000}))
    monkeypatch.setattr(
        "kvpilot.agent.training.seeds.SeedRun._words",
        lambda self, progress: signal.raise_signal(signal.SIGINT) or "",
    )
    assert run_train(request, resume=False) == 130
    assert load_exported(request.out / "policy").name == "ppo"


def test_what_was_tuned_may_lie_in_the_folder_of_the_training(make_request, tuned):
    request = make_request()
    request.out.mkdir(parents=True)
    inside = request.out / "tuned.json"
    inside.write_bytes(request.tuned_path.read_bytes())
    open_folder(replace(request, tuned_path=inside), resume=False)
    assert read_config(request.out / "config.toml") == SMALLEST


def test_a_training_is_not_overwritten_nor_mixed_with_another(make_request, run, tuned):
    config = SMALLEST.with_(demonstrations={"teacher": "rule"}, ppo={"steps": 0})
    request = make_request(config)
    with pytest.raises(TrainingError, match="holds no training to resume"):
        run(request, resume=True)
    run(request)
    with pytest.raises(TrainingError, match="--resume, or name another folder"):
        run(request)
    with pytest.raises(TrainingError, match=r"config\.toml differs"):
        run(make_request(SMALLEST), resume=True)
    tuned.write_text(tuned.read_text() + "\n")
    with pytest.raises(TrainingError, match="other tuned_sha256"):
        run(make_request(config), resume=True)
    tuned.unlink()
    assert run(request, resume=True).is_complete  # it is read once


def test_a_rule_can_be_cloned_onto_any_action_set(make_request, run):
    for actions in ("absolute", "delta"):
        teacher = replace(SMALLEST.demonstrations, teacher="rule", rounds=1)
        environment = replace(SMALLEST.environment, actions=actions)
        config = replace(SMALLEST, demonstrations=teacher, environment=environment).with_(ppo={"steps": 16})
        done = run(make_request(config, actions))
        assert load_exported(done.policy).description.actions.to_json()["kind"] == actions


def test_a_study_of_another_version_is_refused(make_request, run, tuned):
    values = json.loads(tuned.read_text())
    tuned.write_text(json.dumps({**values, "kvpilot_tuned": 99}))
    with pytest.raises(TunedFormError, match="99"):
        run(make_request())
    tuned.unlink()
    with pytest.raises(TunedFormError, match=r"tuned\.json cannot be read"):
        run(make_request())


def test_a_recurrent_policy_trains_and_runs(make_request, run, workload):
    config = SMALLEST.with_(
        environment={"stack": 1},
        demonstrations={"rounds": 1},
        clone={"members": 1, "epochs": 3},
        ppo={"recurrent": True, "lstm_units": 4, "steps": 16},
    )
    done = run(make_request(config))
    assert [point.steps for point in done.seeds[0]] == [0, 16]
    policy = load_exported(done.policy)
    assert policy.network.lstm is not None
    result = run_episode(workload.with_(split="validation").draw(500_000), policy, decide_every=1)
    assert result.reward == pytest.approx(done.score.reward)


def test_a_tuned_file_of_other_workloads_is_refused(make_request, tuned):
    text = json.loads(tuned.read_text())
    tuned.write_text(json.dumps({**text, "hashes": {"another": "0"}}))
    with pytest.raises(TunedFormError, match="was tuned for other workloads: small"):
        run_train(make_request(), resume=False)
