import json
import signal
from dataclasses import replace

import pytest

from kvpilot.agent.evaluation import command
from kvpilot.agent.evaluation.command import run_evaluate
from kvpilot.agent.evaluation.config import EvaluateConfig, choose_policies
from kvpilot.agent.evaluation.outcome import Outcomes, collect
from kvpilot.agent.evaluation.sheets import (
    NOTHING,
    differences_sheet,
    policies_sheet,
    rewards_sheet,
    sentences,
)
from kvpilot.agent.policies.spec import static_spec
from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.env.tuning.rollout import EpisodeResult


@pytest.fixture
def config(workload, tuned, tmp_path) -> EvaluateConfig:
    learned = [static_spec({**tuned.portfolio[1].knobs, "max_batch": size}, "ppo") for size in (6, 7)]
    return EvaluateConfig(
        workloads={"small": workload.with_(split="test", seconds=(40.0, 60.0))},
        label="test",
        policies=choose_policies(tuned, learned, with_peers=True, oracle=(20.0, 20.0)),
        tuned=tmp_path / "tuned.json",
        out=tmp_path / "evaluation.json",
        cache=tmp_path / "runs",
        episodes=2,
        workers=1,
    )


def test_every_policy_meets_the_same_episodes_and_the_report_says_what_was_held_out(config, capsys):
    assert run_evaluate(config) == 0
    values = json.loads(config.out.read_text())
    labels = [policy.label for policy in config.policies]
    assert list(values["results"]) == list(dict.fromkeys(labels))
    assert len(values["results"]["ppo"]) == 2  # seeds
    assert values["split"]["evaluated_on"] == ["test"]
    assert values["split"]["sessions"]["sessions.jsonl"]["test"] >= 8
    small = values["groups"]["small"]
    for label, policy in small["policies"].items():
        rewards = [[summary["reward"] for summary in seed] for seed in values["results"][label]]
        assert policy["reward"] == pytest.approx(sum(map(sum, rewards)) / sum(map(len, rewards)))
        if label != "static-best":
            ours = policy["reward"] - small["policies"]["static-best"]["reward"]
            assert policy["over"]["static-best"]["value"] == pytest.approx(ours)
    page = config.out.with_suffix(".html").read_text()
    assert "First: engine defaults" in page
    assert page.index("First: engine defaults") < page.index("ppo: what it adds")
    assert "small-kv_level" in page
    assert "What was held out" in page
    assert "Static tuning over engine defaults" in capsys.readouterr().out


def test_runs_are_kept_so_that_a_further_policy_costs_its_own_runs_only(config):
    few = replace(config, policies=config.policies[:3])
    assert run_evaluate(few) == 0
    kept = {path.name: path.stat().st_mtime_ns for path in config.cache.iterdir()}
    assert len(kept) == 6
    more = replace(config, policies=(*config.policies[:3], static_spec({"kv_level": 1}, "mine")))
    assert run_evaluate(more) == 0
    after = {path.name: path.stat().st_mtime_ns for path in config.cache.iterdir()}
    assert len(after) == 8
    assert all(after[name] == when for name, when in kept.items())


def test_ctrl_c_keeps_what_was_run_and_says_so(config, monkeypatch, capsys):
    real = command.run_all

    def interrupted(workers, runs, *, on_done, is_stopped):
        def done_once(index, outcome):
            on_done(index, outcome)
            signal.raise_signal(signal.SIGINT)

        return real(workers, runs[:4], on_done=done_once, is_stopped=is_stopped)

    monkeypatch.setattr(command, "run_all", interrupted)
    assert run_evaluate(config) == 130
    assert 1 <= len(list(config.cache.glob("*.json"))) <= 4
    assert not config.out.exists()
    assert "the same command goes on" in capsys.readouterr().out.replace("\n", " ")


def result(family: str, reward: float) -> EpisodeResult:
    summary = {"reward": reward, "hit_rate": None, "e2e_seconds": {"mean": 2.0}, "quality_loss": 0.0}
    return EpisodeResult(policy="", episode={"family": family}, windows={}, summary=summary)


def outcomes_of(rewards: dict[str, list[float]], families: list[str]) -> Outcomes:
    runs = [result(family, rewards[label][k]) for k, family in enumerate(families) for label in rewards]
    return collect(families, list(rewards), runs, str)


def test_what_cannot_be_won_is_said():
    outcomes = outcomes_of(
        {
            "default": [0.1, 0.1, 0.2, 0.2],
            "static-best": [0.4, 0.5, 0.4, 0.4],
            "ppo": [0.5, 0.6, 0.4, 0.39],
            "oracle": [0.6, 0.7, 0.41, 0.41],
        },
        ["switch", "switch", "stationary", "stationary"],
    )
    assert list(outcomes.groups()) == ["switch", "stationary", "all"]
    assert outcomes.can_be_won([0, 1]) is True
    assert outcomes.can_be_won([2, 3]) is False
    rows = {row[0]: row for row in differences_sheet(outcomes, "ppo").rows}
    assert rows["switch"][-1].startswith("50%")
    assert rows["stationary"][-1] == NOTHING
    assert rewards_sheet(outcomes).rows[-1] == ["", "", NOTHING, ""]
    said = sentences(outcomes)
    assert said[0].startswith("Static tuning over engine defaults (all): reward +0.275")
    assert any("stationary" in sentence and NOTHING[1:] in sentence for sentence in said)
    labels = [row[0] for row in policies_sheet(outcomes, "switch").rows]
    assert labels == ["Reward", "Whole answer, mean", "Quality loss, mean KL per token"]


def test_losses_are_called_losses():
    outcomes = outcomes_of(
        {"default": [0.1] * 4, "static-best": [0.4, 0.5, 0.4, 0.5], "ppo": [0.3, 0.38, 0.29, 0.4]},
        ["bursts"] * 4,
    )
    assert any(
        sentence.startswith("ppo over static-best") and sentence.endswith("worse.")
        for sentence in sentences(outcomes)
    )
    assert outcomes.oracle_gain([0]) is None


def test_a_policy_that_fails_somewhere_is_left_out_and_named():
    runs = [result("bursts", 0.1), result("bursts", 0.2), KVPilotError("kv_level=3 is invalid")]
    outcomes = collect(["bursts"], ["default", "static-best", "mine"], runs, lambda k: f"episode {k}")
    assert outcomes.labels == ["default", "static-best"]
    assert outcomes.failures == {"mine": "episode 0: kv_level=3 is invalid"}


def test_configurations_that_cannot_be_compared_are_refused(config):
    with pytest.raises(ConfigError, match="static-best is missing"):
        replace(config, policies=config.policies[:1])
    with pytest.raises(ConfigError, match="policy='default' is given twice"):
        replace(config, policies=(*config.policies, config.policies[0]))
    with pytest.raises(ConfigError, match="episodes=0"):
        replace(config, episodes=0)
