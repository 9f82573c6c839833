"""What a replay refuses before it begins: numbers that make no sense, or more than a machine can hold."""

from collections.abc import Mapping, Sequence
from math import ceil, inf, isfinite

from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.formats import payload_bytes
from kvpilot.env.simulator.latency import LatencyProfile, ProfiledModel

MAX_WINDOWS = 10_000  # points of a time series; each is a row of the result and a dot of every chart
DEFAULT_WINDOWS = 120
MAX_PAGES = 1 << 23  # of a simulated pool: each takes some 70 bytes here


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


def check_pool(engine: EngineConfig, model: ProfiledModel) -> None:
    """Raises ConfigError for a pool with more pages than a simulation should hold."""
    page_bytes = payload_bytes(engine.ladder[0], model.page_shape(engine.page_size))
    num_pages = engine.pool_bytes // page_bytes
    if num_pages > MAX_PAGES:
        raise ConfigError(
            f"pool_bytes={engine.pool_bytes} is invalid: {num_pages:,} pages of {engine.page_size} tokens, "
            f"expected at most {MAX_PAGES:,}, with this model --pool-mb {MAX_PAGES * page_bytes >> 20}; "
            "or a larger page_size"
        )


def check_costs(profile: LatencyProfile, ladder: Sequence[str]) -> None:
    """Raises ConfigError unless the profile knows what pages of this ladder cost."""
    for field, codecs in (("kv_byte", ladder), ("convert", ladder[1:])):
        missing = [codec for codec in codecs if codec not in getattr(profile, field)]
        if missing:
            raise ConfigError(
                f"profile {profile.name!r} has no {field} for {', '.join(missing)}: expected all of the ladder "
                f"{', '.join(ladder)}; calibrate it with that ladder"
            )


def check_losses(losses: Mapping[str, float], ladder: Sequence[str], kv_level: int, *, source: str) -> None:
    """Raises ConfigError unless the loss of every codec that pages may be stepped down to is known."""
    missing = [codec for codec in ladder[1 : kv_level + 1] if codec not in losses]
    if missing:
        raise ConfigError(
            f"profile {source!r} has no quality_loss for {', '.join(missing)}, which kv_level={kv_level} allows: "
            "expected one per codec (mean KL per token), or a lower kv_level"
        )


def _upwards(seconds: float) -> str:
    """Two decimals that are not below `seconds`."""
    return f"{ceil(seconds * 100) / 100:g}"
