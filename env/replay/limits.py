"""What a replay refuses before it begins: numbers that make no sense, or more than a machine can hold."""

from math import ceil, inf, isfinite

from kvpilot.engine.errors import ConfigError

MAX_WINDOWS = 10_000  # points of a time series; each is a row of the result and a dot of every chart
DEFAULT_WINDOWS = 120


def window_of(asked: float | None, seconds: float, *, name: str) -> float:
    """Seconds per window of a replay of `seconds`: what is asked for, else a 120th. ConfigError names `name`."""
    if asked is None:
        return max(1.0, round(seconds / DEFAULT_WINDOWS, 1))
    check_number(asked, name=name, above=0.0)
    if asked * MAX_WINDOWS < seconds:
        raise ConfigError(
            f"{name}={asked:g} is invalid: {seconds / asked:,.0f} windows in {seconds:,.0f} s, "
            f"expected at most {MAX_WINDOWS:,}: at least {_upwards(seconds / MAX_WINDOWS)} s"
        )
    return asked


def check_number(
    value: float, *, name: str, low: float = -inf, above: float = -inf, may_be_inf: bool = False
) -> None:
    """Raises ConfigError unless `value` is a number, at least `low` and more than `above`."""
    is_number = isfinite(value) or (may_be_inf and value == inf)
    if not is_number or value < low or value <= above:
        bounds = f"> {above:g}" if above > -inf else f">= {low:g}"
        raise ConfigError(f"{name}={value:g} is invalid: expected a number {bounds}")


def _upwards(seconds: float) -> str:
    """Two decimals that are not below `seconds`."""
    return f"{ceil(seconds * 100) / 100:g}"
