"""Why something was held or shrunk: the codes of refusals."""

from enum import StrEnum
from typing import NamedTuple


class Reason(StrEnum):
    # the observation
    WARMUP = "too-few-observations"
    RESET = "counter-reset"
    MISSING = "missing-signal"
    NOT_FINITE = "not-finite-signal"
    IMPLAUSIBLE = "implausible-signal"
    STALE = "stale-observation"
    FROZEN = "frozen-metrics"
    WINDOW = "window-length"
    SOURCE = "no-observation"
    OUTSIDE = "outside-training-envelope"
    # the wish
    UNKNOWN = "unknown-knob"
    NOT_HOT = "not-hot"
    NOT_A_NUMBER = "not-a-number"
    NOT_AN_INTEGER = "not-an-integer"
    BOUNDS = "bounds"
    STEP = "step"
    INTERVAL = "interval"
    BUDGET = "change-budget"
    FLIPS = "direction-flips"
    PENDING = "pending"
    KNOBS_ODD = "knob-outside-bounds"
    QUALITY = "quality-budget"
    # the outcome of an earlier change
    SETTLING = "settling"
    SLO = "slo-violated"
    REGRESSED = "slo-regressed"
    STALLED = "no-progress"
    PARTIAL = "partly-applied"
    SAFE_MODE = "safe-mode"
    # the loop
    ADVISORY = "advisory"
    BASELINE = "baseline-replica"
    OFF = "off"
    KILLED = "kill-switch"
    HOLD = "hold"
    CONFLICT = "someone-else-changed-the-knobs"
    UNREACHABLE = "engine-unreachable"
    UNAUTHORIZED = "unauthorized"
    INVALID = "engine-refused"
    POLICY = "policy-failed"
    DEADLINE = "decision-deadline"
    BREAKER = "circuit-breaker-open"
    AUDIT = "audit-failed"


class Refusal(NamedTuple):
    """`knob` is None if the whole decision is held."""

    reason: Reason
    knob: str | None
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}{f' {self.knob}' if self.knob else ''}: {self.detail}"


class Verdict(NamedTuple):
    """What may be written now, and everything that was shrunk or held."""

    changes: dict[str, float | int]
    refusals: list[Refusal]
