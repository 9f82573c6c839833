"""From a trained network to the files that run without torch."""

from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from stable_baselines3.common.policies import ActorCriticPolicy

from kvpilot.agent.policies.exported import PolicyDescription, write_exported
from kvpilot.agent.provenance import run_facts
from kvpilot.agent.training.config import to_toml
from kvpilot.agent.training.demonstrations import Demonstrations
from kvpilot.agent.training.networks import actor_tensors
from kvpilot.agent.training.request import TrainRequest
from kvpilot.engine.config import KnobBounds, knob_bounds

NAME = "ppo"


def export(
    policy: ActorCriticPolicy,
    request: TrainRequest,
    data: Demonstrations,
    folder: Path,
    evaluation: Mapping[str, Any],
) -> None:
    """Writes `policy.json` and `policy.safetensors`. `data` gives the envelope."""
    environment = request.config.environment
    workload = next(iter(request.workloads.values()))
    description = PolicyDescription(
        name=NAME,
        actions=request.actions,
        stack=environment.stack,
        averages=environment.averages,
        interval_seconds=environment.decide_every * workload.interval_seconds,
        bounds=trained_bounds(request),
        envelope_low=tuple(data.features.min(axis=0).tolist()),
        envelope_high=tuple(data.features.max(axis=0).tolist()),
        provenance=provenance(request),
        evaluation=evaluation,
    )
    write_exported(folder, description, actor_tensors(policy))


def trained_bounds(request: TrainRequest) -> dict[str, KnobBounds]:
    return knob_bounds(request.training_episode(0).engine_config())


def provenance(request: TrainRequest) -> dict[str, Any]:
    return {
        **run_facts(),
        "command": request.command,
        "config_sha256": sha256(to_toml(request.config).encode()).hexdigest(),
        "tuned_sha256": request.tuned_sha256,
        "workloads": request.hashes,
        "split": "train",
    }
