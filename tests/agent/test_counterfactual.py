"""What the proposed knobs would have given: a real simulation in a real child process."""

import json
import threading
from pathlib import Path

import pytest

from kvpilot.agent.control.audit import AuditLog
from kvpilot.agent.control.config import CounterfactualSettings
from kvpilot.agent.counterfactual.loop import FIGURES, Counterfactual, CounterfactualError, Question, in_words
from kvpilot.engine.errors import ConfigError

GOOD = {"ttl_seconds": 60.0, "size_factor": 0.3, "max_batch": 16, "kv_level": 1}
POOL_BYTES = 1 << 30
PROFILE = Path(__file__).parents[1] / "faults" / "profile.json"  # frozen, unlike the shipped ones
SLO = {"ttft_p99_seconds": 2.0}


class Shown:
    """Stands where the metrics do."""

    def __init__(self) -> None:
        self.results: list[tuple[str, dict, dict]] = []
        self.arrived = threading.Event()

    def set_counterfactual(self, traffic, proposed, present) -> None:
        self.results.append((traffic, dict(proposed), dict(present)))
        self.arrived.set()


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "traffic.jsonl"
    lines = [
        {
            "arrival": 1.7e9 + 0.1 * n,
            "prompt_tokens": 320,
            "output_tokens": 32,
            "block_size": 32,
            "blocks": [1, 2, 3, 4, 5, *range(10 * n + 10, 10 * n + 15)],
        }
        for n in range(1200)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"arrival": 17')  # half written
    return path


@pytest.fixture
def counterfactual(trace, tmp_path):
    def make(**changes) -> Counterfactual:
        fixed = {"trace": trace, "profile": str(PROFILE), "window_seconds": 60.0}
        settings = CounterfactualSettings(**{**fixed, **changes})
        return Counterfactual(settings, SLO, AuditLog(tmp_path / "audit.jsonl"), Shown())

    return make


def test_a_worse_proposal_is_seen_to_be_worse(counterfactual):
    question = Question(GOOD, {**GOOD, "max_batch": 1}, POOL_BYTES)
    answer = counterfactual().simulate(question)
    assert answer["requests"] == 601
    present, proposed = answer["present"], answer["proposed"]
    assert set(FIGURES) <= set(present)
    assert proposed["e2e_mean_seconds"] > present["e2e_mean_seconds"]
    assert 0.35 < present["hit_rate"] <= 0.5
    assert "max_batch=1" in in_words(question, answer)


def test_the_same_knobs_give_the_same_figures(counterfactual):
    answer = counterfactual().simulate(Question(GOOD, GOOD, POOL_BYTES))
    assert answer["present"] == answer["proposed"]


def test_a_failure_says_what_the_worker_said(counterfactual):
    broken = counterfactual(profile="no-such-profile")
    with pytest.raises(CounterfactualError, match="no-such-profile"):
        broken.simulate(Question(GOOD, GOOD, POOL_BYTES))
    with pytest.raises(CounterfactualError, match="no answer within"):
        counterfactual(timeout_seconds=0.001).simulate(Question(GOOD, GOOD, POOL_BYTES))


def test_a_folder_that_is_not_there_is_said_at_start(tmp_path):
    settings = CounterfactualSettings(trace=tmp_path / "none" / "traffic.jsonl")
    with pytest.raises(ConfigError, match="--record"):
        Counterfactual(settings, SLO, AuditLog(tmp_path / "audit.jsonl"), Shown())
