"""Policies by name, or from a file. None of them needs torch."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from kvpilot.agent.policies.bandit import BanditPolicy
from kvpilot.agent.policies.default import DefaultPolicy
from kvpilot.agent.policies.hill_climb import HillClimbPolicy
from kvpilot.agent.policies.hysteresis import HysteresisPolicy
from kvpilot.agent.policies.random import RandomPolicy
from kvpilot.agent.policies.static import StaticPolicy
from kvpilot.agent.policies.threshold import ThresholdPolicy
from kvpilot.engine.config import KNOB_NAMES
from kvpilot.engine.errors import ConfigError
from kvpilot.env.policy import Policy

FROM_FILE = ("static", "hysteresis")
SHIPPED = Path(__file__).parent / "ppo"  # policy.json says what it was trained on, and by which command


def load_policy(spec: str) -> Policy:
    """A name of NAMED; `static:FILE` (knobs as JSON, or the result of `autotune tune`), `hysteresis:FILE`
    (the latter); or the path of an exported policy.

    Raises ConfigError for what is none of these, TunedFormError for files of another form.
    """
    if spec in NAMED:
        return NAMED[spec]()
    kind, colon, rest = spec.partition(":")
    if colon and kind in FROM_FILE:
        return _from_file(kind, Path(rest))
    if Path(spec).exists():
        return _exported(Path(spec))
    expected = f"{', '.join(NAMED)}, static:FILE, hysteresis:FILE, or the folder of an exported policy"
    raise ConfigError(f"policy={spec!r} is invalid: expected {expected}")


def _exported(folder: Path) -> Policy:
    from kvpilot.agent.policies.exported import load_exported  # which needs safetensors

    return load_exported(folder)


def _from_file(kind: str, path: Path) -> Policy:
    from kvpilot.agent.tune.result import read_tuned  # which needs the policies

    if kind == "hysteresis":
        return HysteresisPolicy(read_tuned(path).hysteresis)
    plain = _plain_knobs(path)
    return StaticPolicy(plain) if plain is not None else StaticPolicy(read_tuned(path).static_best.knobs)


def _plain_knobs(path: Path) -> Mapping[str, float] | None:
    """The knobs of a JSON object that holds nothing else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(values, dict) or not values or not set(values) <= set(KNOB_NAMES):
        return None
    wrong = [name for name, value in values.items() if type(value) not in (int, float)]
    if wrong:
        raise ConfigError(f"{path}: {wrong[0]}={values[wrong[0]]!r} is invalid: expected a number")
    return values


NAMED: dict[str, Callable[..., Policy]] = {
    "default": DefaultPolicy,
    "threshold": ThresholdPolicy,
    "hill-climb": HillClimbPolicy,
    "bandit": BanditPolicy,
    "random": RandomPolicy,
    "ppo": lambda: _exported(SHIPPED),
}
