"""What a good answer is: the service level objective (SLO) of a request."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvpilot.engine.errors import ConfigError

if TYPE_CHECKING:  # the sidecar does without numpy
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class Slo:
    """A request is good if it ends in time: first token and mean gap between tokens."""

    ttft_seconds: float = 5.0
    inter_token_seconds: float = 0.1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise ConfigError(f"slo {name}={value!r} is invalid: expected a number > 0")

    def is_met(self, ttft_seconds: "NDArray[Any]", gap_seconds: "NDArray[Any]") -> "NDArray[Any]":
        """Booleans by request; `gap_seconds` is the mean over its answer, nan for a single token."""
        return (ttft_seconds <= self.ttft_seconds) & ~(gap_seconds > self.inter_token_seconds)
