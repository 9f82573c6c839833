"""Everything that matters to a training run, in one place; saved beside its result."""

import math
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from kvpilot.engine.errors import ConfigError
from kvpilot.env.table import TableReader, read_table

ACTIONS = ("portfolio", "absolute", "delta")
MAX_MEMBERS = 100
TEACHERS = ("rule", "lookahead", "both")


def _setting(default: Any, meaning: str) -> Any:
    """A field whose meaning also stands beside it in the saved file."""
    return field(default=default, metadata={"meaning": meaning})


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What the policy sees and may do."""

    actions: str = _setting("portfolio", "portfolio (of autotune tune), absolute (a grid) or delta (steps)")
    stack: int = _setting(1, "decisions whose windows the policy sees, the latest included")
    averages: tuple[float, ...] = _setting((3.0, 10.0), "decisions over which it also sees running averages")
    decide_every: int = _setting(2, "windows (of the workload's interval, 60 s) between two decisions")
    churn_price: float | None = _setting(None, "reward per knob changed; none: that of the reward")

    def __post_init__(self) -> None:
        _check(self, "actions", self.actions in ACTIONS, f"one of {', '.join(ACTIONS)}")
        _check(self, "stack", 1 <= self.stack <= 16, "an integer in [1, 16]")
        _check(self, "averages", all(1 <= length < math.inf for length in self.averages), "numbers >= 1")
        _check(self, "decide_every", 1 <= self.decide_every <= 16, "an integer in [1, 16]")
        _check(self, "churn_price", self.churn_price is None or self.churn_price >= 0, "a number >= 0")


@dataclass(frozen=True, kw_only=True)
class DemonstrationConfig:
    """Where the first policy comes from: decisions on training episodes, with what they were worth."""

    teacher: str = _setting("lookahead", "rule (tuned hysteresis), lookahead (clairvoyant) or both")
    rounds: int = _setting(3, "of labelling; from the second on along the states that the learner visits")
    episodes: int = _setting(40, "labelled per round")
    label_every: int = _setting(3, "decisions from one with a lookahead to the next")
    horizon_seconds: float = _setting(600.0, "that a lookahead simulates for each action")
    explore: float = _setting(0.2, "share of decisions along the way spent on excursions to random settings")

    def __post_init__(self) -> None:
        _check(self, "teacher", self.teacher in TEACHERS, f"one of {', '.join(TEACHERS)}")
        _check(self, "rounds", self.rounds >= 1, "an integer >= 1")
        _check(self, "episodes", self.episodes >= 1, "an integer >= 1")
        _check(self, "label_every", self.label_every >= 1, "an integer >= 1")
        _check(self, "horizon_seconds", self.horizon_seconds > 0, "a number > 0")
        _check(self, "explore", 0 <= self.explore <= 1, "a number in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class CloneConfig:
    """How the network is fitted to the demonstrations before PPO."""

    members: int = _setting(3, "networks fitted apart, then joined to one that averages them; 1 with an LSTM")
    hidden: tuple[int, ...] = _setting((64, 64), "units per layer of each, of the policy and of the value")
    epochs: int = _setting(300, "over the demonstrations, at most; the best on the held-out tenth is kept")
    learning_rate: float = _setting(1e-3, "of Adam")
    weight_decay: float = _setting(1e-3, "decoupled")
    input_noise: float = _setting(1.0, "standard deviations of noise on the inputs while fitting")
    temperature: float = _setting(0.01, "reward by which an action must be better to be e times likelier")
    hold_bias: float = _setting(0.0, "reward by which a change must beat holding to be preferred")
    rule_weight: float = _setting(0.1, "of imitating the rule, where teacher is both")

    def __post_init__(self) -> None:
        positive = bool(self.hidden) and all(units >= 1 for units in self.hidden)
        _check(self, "hidden", positive, "a non-empty list of integers >= 1")
        _check(self, "members", 1 <= self.members <= MAX_MEMBERS, f"an integer in [1, {MAX_MEMBERS}]")
        _check(self, "epochs", self.epochs >= 0, "an integer >= 0")
        _check(self, "learning_rate", self.learning_rate > 0, "a number > 0")
        _check(self, "weight_decay", self.weight_decay >= 0, "a number >= 0")
        _check(self, "input_noise", self.input_noise >= 0, "a number >= 0")
        _check(self, "temperature", self.temperature > 0, "a number > 0")
        _check(self, "hold_bias", self.hold_bias >= 0, "a number >= 0")
        _check(self, "rule_weight", self.rule_weight >= 0, "a number >= 0")


@dataclass(frozen=True, kw_only=True)
class PpoConfig:
    """Proximal policy optimisation, by stable-baselines3."""

    steps: int = _setting(4096, "decisions per seed; 0 leaves it at the clone")
    recurrent: bool = _setting(False, "an LSTM before the layers (RecurrentPPO of sb3-contrib)")
    lstm_units: int = _setting(64, "of that LSTM")
    envs: int = _setting(2, "processes that simulate")
    rollout_steps: int = _setting(256, "decisions per process between two updates")
    batch_size: int = _setting(128, "decisions per gradient step")
    epochs: int = _setting(5, "over each rollout")
    learning_rate: float = _setting(5e-5, "small: the clone is the start, not noise")
    clip: float = _setting(0.1, "of the probability ratio")
    target_kl: float = _setting(0.01, "ends the epochs of an update early")
    discount: float = _setting(0.93, "per decision")
    gae_lambda: float = _setting(0.9, "of generalised advantage estimation")
    entropy_weight: float = _setting(0.0, "of the entropy bonus")
    value_weight: float = _setting(0.5, "of the value loss")
    max_grad_norm: float = _setting(0.5, "gradients are clipped to it")

    def __post_init__(self) -> None:
        _check(self, "steps", self.steps >= 0, "an integer >= 0")
        for name in ("lstm_units", "envs", "epochs"):
            _check(self, name, getattr(self, name) >= 1, "an integer >= 1")
        _check(self, "rollout_steps", self.rollout_steps >= 2, "an integer >= 2")
        whole = self.batch_size >= 2 and self.envs * self.rollout_steps % self.batch_size == 0
        _check(self, "batch_size", whole, "an integer >= 2 that divides envs * rollout_steps")
        for name in ("learning_rate", "clip", "target_kl", "max_grad_norm"):
            _check(self, name, getattr(self, name) > 0, "a number > 0")
        for name in ("discount", "gae_lambda"):
            _check(self, name, 0 <= getattr(self, name) <= 1, "a number in [0, 1]")
        for name in ("entropy_weight", "value_weight"):
            _check(self, name, getattr(self, name) >= 0, "a number >= 0")


@dataclass(frozen=True, kw_only=True)
class SelectionConfig:
    """Which of the trained policies is kept: the best on validation episodes, which nothing was fitted to."""

    episodes: int = _setting(2, "validation episodes of each workload")
    every_steps: int = _setting(2048, "decisions of PPO between two validations (and checkpoints)")

    def __post_init__(self) -> None:
        _check(self, "episodes", self.episodes >= 1, "an integer >= 1")
        _check(self, "every_steps", self.every_steps >= 1, "an integer >= 1")


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. Same config, traces and seeds: same demonstrations and clones."""

    workloads: tuple[str, ...] = _setting((), "standard workloads to draw from; empty: all of them")
    seeds: int = _setting(5, "networks trained, from different initial weights and episodes")
    first_seed: int = _setting(0, "of these")
    workers: int = _setting(2, "processes that simulate while labelling and validating")
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    demonstrations: DemonstrationConfig = field(default_factory=DemonstrationConfig)
    clone: CloneConfig = field(default_factory=CloneConfig)
    ppo: PpoConfig = field(default_factory=PpoConfig)
    selection: SelectionConfig = field(default_factory=SelectionConfig)

    def __post_init__(self) -> None:
        _check(self, "seeds", self.seeds >= 1, "an integer >= 1")
        _check(self, "first_seed", self.first_seed >= 0, "an integer >= 0")
        _check(self, "workers", self.workers >= 1, "an integer >= 1")
        absolute = self.environment.actions != "portfolio"
        fits = not (absolute and self.demonstrations.teacher != "rule")
        _check(self.demonstrations, "teacher", fits, "rule, where actions is not portfolio")
        joins = self.clone.members == 1 or not self.ppo.recurrent
        _check(
            self.clone,
            "members",
            joins,
            "1, where ppo.recurrent is true: networks with an LSTM cannot be joined",
        )

    def with_(self, **changes: Any) -> "TrainConfig":
        """`with_(seeds=1, ppo={"steps": 0})`: a nested mapping changes fields of that section."""
        sections = {
            name: replace(getattr(self, name), **value) if isinstance(value, dict) else value
            for name, value in changes.items()
        }
        return replace(self, **sections)


def _check(config: object, name: str, ok: bool, bounds: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={getattr(config, name)!r} is invalid: expected {bounds}")


def quick(*, one_workload: bool = True) -> TrainConfig:
    """All stages in about three minutes on two cores: shows that training works, not what it can reach."""
    return TrainConfig(
        workloads=("agentic_drift",) if one_workload else (),
        seeds=1,
        demonstrations=DemonstrationConfig(rounds=1, episodes=2, label_every=4, horizon_seconds=480.0),
        clone=CloneConfig(members=1, hidden=(32,), epochs=60),
        ppo=PpoConfig(steps=128, rollout_steps=64, batch_size=64),
        selection=SelectionConfig(episodes=1, every_steps=128),
    )


def read_config(path: Path, base: TrainConfig | None = None) -> TrainConfig:
    """TOML with a subset of the fields, over `base`. Raises ConfigError naming file, field and value."""
    return TableReader(finite=True).build(TrainConfig, read_table(path), str(path), base or TrainConfig())


def to_toml(config: TrainConfig) -> str:
    """All fields with their meaning; `read_config` reads it back. What is None is left out, as a comment."""
    sections = [f.name for f in fields(config) if is_dataclass(getattr(config, f.name))]
    lines = _lines(config, skip=sections)
    for name in sections:
        lines += ["", f"[{name}]", *_lines(getattr(config, name))]
    return "\n".join(lines) + "\n"


def _lines(config: Any, skip: list[str] | None = None) -> list[str]:
    lines = []
    for f in fields(config):
        if f.name not in (skip or ()):
            value = getattr(config, f.name)
            text = f"# {f.name} =" if value is None else f"{f.name} = {_toml(value)}"
            lines.append(f"{text}  # {f.metadata['meaning']}")
    return lines


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(part) for part in value)}]"
    return repr(value)
