"""What an agent may do: sets of actions over the one thing that can be done, setting knobs. Action 0 holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

from kvpilot.engine.config import KNOB_NAMES, KnobBounds
from kvpilot.engine.errors import ConfigError

Action = int | Sequence[int]
Knobs = Mapping[str, float | int]


class Actions(Protocol):
    """A policy's choices: as many numbers as `sizes` has entries, each below its entry; one number if there is one."""

    @property
    def sizes(self) -> tuple[int, ...]: ...

    @property
    def size(self) -> int:
        """How many different actions there are."""
        ...

    def changes(self, action: Action, knobs: Knobs, bounds: Mapping[str, KnobBounds]) -> dict[str, float]:
        """The knobs that would change and their new values, within bounds; `knobs` are the requested values."""
        ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A named configuration; knobs that are left out stay as they are."""

    name: str
    knobs: Knobs

    def __post_init__(self) -> None:
        _check_names(self.name, self.knobs)
        object.__setattr__(self, "knobs", dict(self.knobs))


@dataclass(frozen=True)
class Portfolio:
    """Hold, or switch to one of the settings."""

    settings: tuple[Setting, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(self.settings))
        names = [setting.name for setting in self.settings]
        if not names or len(set(names)) < len(names):
            raise ConfigError(
                f"settings={names!r} is invalid: expected at least one, with names of their own"
            )

    @property
    def sizes(self) -> tuple[int, ...]:
        return (len(self.settings) + 1,)

    @property
    def size(self) -> int:
        return prod(self.sizes)

    def changes(self, action: Action, knobs: Knobs, bounds: Mapping[str, KnobBounds]) -> dict[str, float]:
        (index,) = _indices(action, self.sizes)
        return _differing(self.settings[index - 1].knobs, knobs, bounds) if index else {}

    def to_json(self) -> dict[str, Any]:
        settings = [{"name": setting.name, "knobs": dict(setting.knobs)} for setting in self.settings]
        return {"kind": "portfolio", "settings": settings}


@dataclass(frozen=True)
class Absolute:
    """Per knob: hold, or go to a value of its grid."""

    grids: Mapping[str, tuple[float, ...]]

    def __post_init__(self) -> None:
        _check_names("grids", self.grids)
        object.__setattr__(self, "grids", {name: tuple(grid) for name, grid in self.grids.items()})
        if not self.grids or not all(self.grids.values()):
            raise ConfigError(f"grids={dict(self.grids)!r} is invalid: expected values for at least one knob")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(len(grid) + 1 for grid in self.grids.values())

    @property
    def size(self) -> int:
        return prod(self.sizes)

    def changes(self, action: Action, knobs: Knobs, bounds: Mapping[str, KnobBounds]) -> dict[str, float]:
        chosen = zip(self.grids.items(), _indices(action, self.sizes), strict=True)
        wanted = {name: grid[index - 1] for (name, grid), index in chosen if index}
        return _differing(wanted, knobs, bounds)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "absolute", "grids": {name: list(grid) for name, grid in self.grids.items()}}


DEFAULT_GRIDS: dict[str, tuple[float, ...]] = {
    "ttl_seconds": (0.0, 20.0, 60.0, 300.0),
    "size_factor": (0.0, 0.3, 0.6, 0.8),
    "max_batch": (4, 8, 16, 32, 64),
    "kv_level": (0, 1, 2),
}


@dataclass(frozen=True, kw_only=True)
class Delta:
    """Per knob: hold (0), one step down (1) or up (2)."""

    factor: float = 2.0  # of knobs on a logarithmic scale
    first_seconds: float = 5.0  # of ttl_seconds: the first step up from 0, and the last one above it
    size_step: float = 0.1

    @property
    def sizes(self) -> tuple[int, ...]:
        return (3,) * len(KNOB_NAMES)

    @property
    def size(self) -> int:
        return prod(self.sizes)

    def changes(self, action: Action, knobs: Knobs, bounds: Mapping[str, KnobBounds]) -> dict[str, float]:
        moves = zip(KNOB_NAMES, _indices(action, self.sizes), strict=True)
        wanted = {name: self._moved(name, knobs[name], move == 2) for name, move in moves if move}
        return _differing(wanted, knobs, bounds)

    def _moved(self, name: str, value: float, up: bool) -> float:
        match name:
            case "ttl_seconds" if up:
                return max(value * self.factor, self.first_seconds)
            case "ttl_seconds":
                return value / self.factor if value > self.first_seconds else 0.0
            case "max_batch":
                return max(value + 1, value * self.factor) if up else value / self.factor
            case "size_factor":
                return round(value + (self.size_step if up else -self.size_step), 6)
            case _:
                return value + (1 if up else -1)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "delta", **vars(self)}


def actions_from_json(values: Mapping[str, Any]) -> Actions:
    """What `to_json` gave. Raises ConfigError."""
    rest = {name: value for name, value in values.items() if name != "kind"}
    try:
        match values.get("kind"):
            case "portfolio":
                return Portfolio(tuple(Setting(**setting) for setting in rest["settings"]))
            case "absolute":
                return Absolute(rest["grids"])
            case "delta":
                return Delta(**rest)
    except (KeyError, TypeError) as error:
        raise ConfigError(f"the action set is malformed: {error}") from error
    raise ConfigError(f"kind={values.get('kind')!r} is invalid: expected portfolio, absolute or delta")


def _check_names(what: str, knobs: Mapping[str, object]) -> None:
    unknown = [name for name in knobs if name not in KNOB_NAMES]
    if unknown:
        raise ConfigError(f"{what}: knob {unknown[0]!r} is invalid: expected {', '.join(KNOB_NAMES)}")


def _indices(action: Action, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The action as numbers; arrays and numpy integers are taken too."""
    given = [action] if not hasattr(action, "__len__") else list(action)  # pyright: ignore[reportArgumentType]
    indices = tuple(int(index) for index in given)  # pyright: ignore[reportArgumentType]
    if len(indices) != len(sizes) or not all(0 <= i < size for i, size in zip(indices, sizes, strict=True)):
        raise ConfigError(f"action={action!r} is invalid: expected numbers below {sizes}")
    return indices


def _differing(
    wanted: Mapping[str, float], knobs: Knobs, bounds: Mapping[str, KnobBounds]
) -> dict[str, float]:
    """Clipped to the bounds, whole where the knob is, without those that are so already."""
    changes: dict[str, float] = {}
    for name, value in wanted.items():
        limit = bounds[name]
        value = min(max(value, limit.low), limit.high)
        value = int(value) if limit.integer else float(value)
        if value != knobs[name]:
            changes[name] = value
    return changes
