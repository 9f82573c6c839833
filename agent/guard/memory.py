"""What the guard remembers from one tick to the next: a value, replaced as a whole, and plain enough for JSON."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from kvpilot.engine.errors import ConfigError


class Move(NamedTuple):
    """A knob that this loop wrote; `time` is on the loop's clock."""

    time: float
    knob: str
    old: float
    new: float

    @property
    def is_up(self) -> bool:
        return self.new > self.old


@dataclass(frozen=True, kw_only=True)
class Watch:
    """The last change of the policy, as long as its effect is on trial."""

    at: float  # on the loop's clock
    before: Mapping[str, float]  # all knobs
    after: Mapping[str, float] = field(default_factory=dict)
    unix_time: float = 0.0  # when the change was made: a new process goes on with the trial
    baseline: tuple[float, ...] = ()  # SLO pressures under them
    met: bool = False  # the SLO held when the change was made
    flushes: bool = False  # it makes the cache drop pages: its gain shows when their users return
    patience_seconds: float = 0.0
    verified: bool = False  # judged once and found good; a later violation still leads back

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Watch":
        """What `asdict` gave, also after a round trip through JSON. Raises TypeError and KeyError."""
        return cls(**{**values, "baseline": tuple(values["baseline"])})


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Times are on the loop's clock but for `reverts`, which outlive the process."""

    moves: tuple[Move, ...] = ()
    baseline: tuple[float, ...] = ()  # SLO pressure of the last windows under the present knobs
    last_good: Mapping[str, float] | None = None  # knobs under which the SLO held
    watch: Watch | None = None
    target: Mapping[str, float] | None = None  # knobs on the way back to which the loop is
    stalled: int = 0  # windows in a row without progress
    frozen_until: float | None = None
    failures: int = 0  # of policy or engine, in a row
    open_until: float | None = None  # the circuit breaker
    reverts: tuple[float, ...] = ()  # Unix times within the last hour
    safe_mode: str = ""  # why it is latched; empty: it is not

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Memory":
        """What `as_dict` gave, also after a round trip through JSON."""
        try:
            watch = None if values["watch"] is None else Watch.from_dict(values["watch"])
            return cls(
                **{
                    **values,
                    "moves": tuple(Move(*move) for move in values["moves"]),
                    "baseline": tuple(values["baseline"]),
                    "reverts": tuple(values["reverts"]),
                    "watch": watch,
                }
            )
        except (KeyError, TypeError) as error:
            raise ConfigError(f"memory={values!r:.80} is not what this version wrote: {error}") from error

    def last_change(self) -> dict[str, float]:
        return {move.knob: move.time for move in self.moves}

    def num_flips(self, knob: str) -> int:
        """Changes of direction among the moves remembered."""
        ways = [move.is_up for move in self.moves if move.knob == knob]
        return sum(a != b for a, b in pairwise(ways))
