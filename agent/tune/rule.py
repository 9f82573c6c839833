"""The hysteresis rule as a search space: which signal, which thresholds, which two of the settings."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvpilot.agent.policies.hysteresis import HysteresisConfig
from kvpilot.agent.policies.spec import PolicySpec

if TYPE_CHECKING:
    import optuna

# Where the upper threshold may lie, in the signal's unit. Pressure is where each of them is high.
RANGES: Mapping[str, tuple[float, float]] = {
    "waiting": (1.0, 64.0),
    "waiting_mean_seconds": (1.0, 120.0),
    "waiting_oldest_seconds": (2.0, 300.0),
    "slo_violation_share": (0.02, 0.9),
    "live_share": (0.3, 0.98),
    "prompt_tokens_per_second": (1e3, 3e5),
}

Settings = Mapping[str, Mapping[str, float]]  # by name


def rule_settings(portfolio: Settings, best: Mapping[str, float], levels: range) -> Settings:
    """What a rule may switch between: the portfolio, and the best setting at every level of the ladder."""
    at_level = {f"static-best at level {level}": {**best, "kv_level": level} for level in levels}
    return {**portfolio, **at_level}


def suggest_rule(trial: "optuna.Trial", settings: Settings) -> HysteresisConfig:
    """Of the rule's parameters only those of its signal exist."""
    signal = trial.suggest_categorical("signal", list(RANGES))
    high = trial.suggest_float(f"{signal}_high", *RANGES[signal], log=True)
    low = high * trial.suggest_float("low_share", 0.2, 1.0)
    names = list(settings)
    calm = settings[trial.suggest_categorical("calm", names)]
    pressure = settings[trial.suggest_categorical("pressure", names)]
    return HysteresisConfig(
        signal=signal,
        high=_rounded(high),
        low=min(_rounded(low), _rounded(high)),
        calm=calm,
        pressure=pressure,
    )


def first_rules(settings: Settings, levels: range) -> list[dict[str, Any]]:
    """To begin with: no rule at all, and one more level of precision given up while requests wait."""
    queue = {"signal": "waiting", "waiting_high": 16.0, "low_share": 0.5}
    best = next(iter(settings))
    steps = [(best, best)]
    steps += [(f"static-best at level {a}", f"static-best at level {a + 1}") for a in list(levels)[:-1]]
    return [{**queue, "calm": calm, "pressure": pressure} for calm, pressure in steps]


def rule_spec(config: HysteresisConfig) -> PolicySpec:
    return PolicySpec(label="hysteresis", kind="hysteresis", config=config.to_json())


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")
