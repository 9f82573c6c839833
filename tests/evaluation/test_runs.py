import json
import shutil
from pathlib import Path

import pytest

from kvpilot.agent import policies
from kvpilot.agent.evaluation.runs import KeepingJob, Run, run_all, workload_hash
from kvpilot.agent.jobs.workers import Workers
from kvpilot.agent.policies.hysteresis import HysteresisPolicy
from kvpilot.agent.policies.spec import PolicySpec, oracle_spec, parse_spec, static_spec, tuned_specs
from kvpilot.agent.policies.static import StaticPolicy
from kvpilot.engine.errors import ConfigError
from kvpilot.env.code_digest import code_digest
from kvpilot.env.observation import Observation
from kvpilot.env.tuning.reward import RewardWeights
from kvpilot.env.tuning.rollout import EpisodeResult

DEFAULT = PolicySpec(label="default", kind="named", config={"name": "default"})


def test_a_result_is_kept_and_read_back_equal(episode, tmp_path):
    run = Run(episode=episode, policy=DEFAULT)
    job = KeepingJob(tmp_path / "kept")
    first = job(run)
    (path,) = (tmp_path / "kept").iterdir()
    assert path.name == f"{run.key}.json"
    values = json.loads(path.read_text())
    values["summary"]["reward"] = 7.0
    path.write_text(json.dumps(values))
    assert job(run).reward == 7.0  # it was read, not run
    path.write_text(path.read_text()[:100])
    assert job(run).to_json() == json.loads(json.dumps(first.to_json()))


def test_the_key_holds_all_that_a_result_depends_on_and_no_label(episode):
    base = Run(episode=episode, policy=static_spec({"kv_level": 1}))
    others = [
        Run(episode=episode, policy=static_spec({"kv_level": 2})),
        Run(episode=episode, policy=base.policy, until_seconds=60.0),
        Run(episode=episode, policy=base.policy, decide_every=3),
        Run(episode=episode, policy=base.policy, weights=RewardWeights(quality=1.0)),
        Run(episode=type(episode)(**{**vars(episode), "seed": 8}), policy=base.policy),
    ]
    assert len({base.key, *(other.key for other in others)}) == 6
    assert Run(episode=episode, policy=static_spec({"kv_level": 1}, "other")).key == base.key
    assert len(code_digest()) == 64


def test_a_folder_that_cannot_be_written_ends_the_run(episode, tmp_path):
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(OSError, match="kept"):  # no error of ours: the policy is not at fault
        KeepingJob(tmp_path / "kept")(Run(episode=episode, policy=DEFAULT, until_seconds=10.0))


def test_equal_runs_are_done_once(episode, tmp_path):
    runs = [
        Run(episode=episode, policy=static_spec({"kv_level": level}), until_seconds=20.0)
        for level in (1, 2, 1)
    ]
    done = []
    with Workers(KeepingJob(tmp_path), 1) as workers:
        first, second, third = run_all(workers, runs, on_done=lambda index, outcome: done.append(index))
    assert sorted(done) == [0, 1]
    assert first is third
    assert isinstance(first, EpisodeResult)
    assert isinstance(second, EpisodeResult)
    assert first.windows["knobs"][0]["kv_level"] == 1
    assert second.windows["knobs"][0]["kv_level"] == 2


def test_the_oracle_does_at_least_as_well_as_its_settings_over_its_horizon(episode, tuned):
    oracle = oracle_spec(tuned.portfolio, 60.0, 30.0)
    results = {
        spec.label: Run(episode=episode, policy=spec)() for spec in (*tuned_specs(tuned), DEFAULT, oracle)
    }
    assert results["oracle"].reward >= results["default"].reward
    assert results["oracle"].reward >= results["static-best"].reward - 0.02
    again = Run(episode=episode, policy=oracle)()
    assert again.summary == results["oracle"].summary


def test_the_oracle_needs_a_simulation(tuned, episode):
    policy = oracle_spec(tuned.portfolio, 60.0, 30.0).make()
    with pytest.raises(ConfigError, match="simulation"):
        policy.propose(Observation(time=0.0, seconds=60.0), {}, {})
    with pytest.raises(ConfigError, match="every_seconds"):
        oracle_spec(tuned.portfolio, 60.0, 90.0).make()


def test_specs_are_made_from_words(tmp_path):
    path = tmp_path / "knobs.json"
    path.write_text('{"kv_level": 2}')
    spec = parse_spec(f"mine=static:{path}")
    assert (spec.label, spec.kind) == ("mine", "file")
    moved = tmp_path / "moved.json"
    path.rename(moved)
    assert parse_spec(f"static:{moved}").key == spec.key
    moved.write_text('{"kv_level": 1}')
    assert parse_spec(f"static:{moved}").key != spec.key
    assert parse_spec("random").make().name == "random"
    with pytest.raises(ConfigError, match="policy='magic'"):
        parse_spec("magic")


def test_what_was_tuned_is_a_policy_by_file(tuned, tmp_path):
    path = tmp_path / "tuned.json"
    tuned.write(path)
    rule, static = parse_spec(f"hysteresis:{path}").make(), parse_spec(f"static:{path}").make()
    assert isinstance(rule, HysteresisPolicy)
    assert isinstance(static, StaticPolicy)
    assert rule.config == tuned.hysteresis
    assert static.wanted == tuned.static_best.knobs


def test_a_workload_is_the_same_whatever_split_is_drawn_from(workload):
    assert workload_hash(workload) == workload_hash(workload.with_(split="test"))
    assert workload_hash(workload) != workload_hash(workload.with_(pool_bytes=workload.pool_bytes * 2))


def test_a_policy_may_lie_in_a_folder_with_an_equals_sign(tmp_path):
    folder = tmp_path / "rate=0.1"
    shutil.copytree(Path(policies.__file__).parent / "ppo", folder)
    assert parse_spec(str(folder)).label == "ppo"
    labelled = parse_spec(f"mine={folder}")
    assert (labelled.label, labelled.config["path"]) == ("mine", str(folder))
