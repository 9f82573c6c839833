"""What `autotune train` is asked to do, and what follows from it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kvpilot.agent.evaluation.runs import workload_hash
from kvpilot.agent.training.actions import action_set
from kvpilot.agent.training.config import TrainConfig
from kvpilot.agent.tune.result import TunedResult, read_tuned
from kvpilot.engine.errors import ConfigError
from kvpilot.env.code_digest import code_digest
from kvpilot.env.tuning.actions import Actions
from kvpilot.env.tuning.episode import Episode
from kvpilot.env.tuning.reward import RewardWeights
from kvpilot.env.tuning.workload import Workload

VALIDATION_SEED = 500_000  # of its first episode; evaluation draws below


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """`workloads` are of the training split; validation draws from theirs."""

    config: TrainConfig
    tuned_path: Path
    workloads: Mapping[str, Workload]
    out: Path
    command: str  # that made it, for the record
    demonstrations: Path | None = None  # folder to share between trainings; None: in `out`

    def __post_init__(self) -> None:
        if not self.workloads:
            raise ConfigError("workloads is empty: expected at least one")

    @cached_property
    def tuned(self) -> TunedResult:
        """Raises TunedFormError, also where it was tuned for other workloads."""
        found = read_tuned(self.tuned_path)
        found.check_workloads(self.hashes, str(self.tuned_path))
        return found

    @cached_property
    def tuned_sha256(self) -> str:
        """Of the file as it was at first: it may be made anew while training goes on."""
        return hashlib.sha256(self.tuned_path.read_bytes()).hexdigest()

    @cached_property
    def actions(self) -> Actions:
        return action_set(self.config, self.tuned)

    @property
    def weights(self) -> RewardWeights:
        price = self.config.environment.churn_price
        return RewardWeights() if price is None else RewardWeights(churn=price)

    @cached_property
    def hashes(self) -> dict[str, str]:
        """Of the workloads with their traces."""
        return {name: workload_hash(workload) for name, workload in self.workloads.items()}

    def training_episode(self, number: int) -> Episode:
        """The workloads in turn."""
        names = list(self.workloads)
        return self.workloads[names[number % len(names)]].draw(number // len(names))

    @property
    def num_training_episodes(self) -> int:
        """All that are labelled; PPO draws from the same, whose references are known then."""
        return self.config.demonstrations.episodes * self.config.demonstrations.rounds

    def episodes_of_each(self) -> list[Episode]:
        """One of each workload for training, and all for validation."""
        return [self.training_episode(k) for k in range(len(self.workloads))] + self.validation_episodes()

    def validation_episodes(self) -> list[Episode]:
        held_out = [workload.with_(split="validation") for workload in self.workloads.values()]
        num = self.config.selection.episodes
        return [workload.draw(VALIDATION_SEED + k) for workload in held_out for k in range(num)]

    @cached_property
    def demonstrations_folder(self) -> Path:
        """One per set of inputs that decide what is labelled."""
        return (self.demonstrations or self.out / "demonstrations") / _digest(
            {
                "simulator": code_digest(),
                "workloads": self.hashes,
                "actions": self.actions.to_json(),
                "rule": self.tuned.hysteresis.to_json(),
                "weights": self.weights.to_json(),
                "decide_every": self.config.environment.decide_every,
                "demonstrations": asdict(self.config.demonstrations),
            }
        )


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
