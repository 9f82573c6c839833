"""The nouns of the loop: its modes, what a tick sees, what it decides, what became of it."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from kvpilot.agent.control.client import KnobState, PatchResult
from kvpilot.agent.guard import Memory, Reason, Refusal
from kvpilot.agent.guard.changes import Allowed
from kvpilot.engine.config import KnobBounds
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.stats import StatsSnapshot
from kvpilot.env.observation import Observation


class Mode(StrEnum):
    OFF = "off"  # observe only
    ADVISORY = "advisory"  # decisions are logged and audited, nothing is written
    CANARY = "canary"  # decisions are written on the pods that the control document names, the others advise
    AUTO = "auto"  # decisions are written


class Outcome(StrEnum):
    OBSERVED = "observed"  # between two decisions
    HELD = "held"  # nothing may be written now
    ADVISED = "advised"  # would have been written in mode auto
    KEPT = "kept"  # the policy wants what is
    APPLIED = "applied"  # read back as effective
    PENDING = "pending"  # accepted, not effective yet
    EFFECTIVE = "effective"  # a pending change has taken effect
    STEPPED_BACK = "stepped-back"  # the guard undid a change
    FAILED = "failed"  # the engine refused it or did not answer


class Engine(Protocol):
    """What the loop needs of the engine; EngineClient is the one over HTTP."""

    def scrape(self) -> StatsSnapshot: ...

    def knobs(self) -> KnobState: ...

    def patch(self, knobs: Mapping[str, object], expected_revision: int | None = None) -> PatchResult: ...


@dataclass(frozen=True, kw_only=True)
class Control:
    """What the loop may do just now, from its configuration, the control document and the kill switches."""

    mode: Mode = Mode.ADVISORY
    acts: bool = False  # whether decisions are written
    killed: str = ""  # which switch; nothing is decided then
    hold: str = ""  # why nothing may be changed: a rollout, scaling
    allowed: Allowed = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All that a decision depends on besides the guard's memory, its limits and the policy."""

    now: float  # the loop's clock
    unix_time: float
    control: Control
    state: KnobState
    observation: Observation | None
    age_seconds: float = 0.0  # of the observation
    windows_seen: int = 0
    signals: Mapping[str, float | None] = field(default_factory=dict)
    problems: tuple[Refusal, ...] = ()  # found while observing
    reuse_seconds: float | None = None  # idle time of cached pages when they were hit, as measured
    due: bool = True  # False: between two decisions; only a step back may come of it


class Failure(NamedTuple):
    """In a proposal's place: the policy raised, or did not answer in time."""

    refusal: Refusal


@dataclass(frozen=True, kw_only=True)
class RestartProposal:
    """A change of what the engine does not accept live: for a human."""

    knob: str
    value: float | int
    how: str

    def __str__(self) -> str:
        return f"{self.knob}={self.value:g} needs a restart: {self.how}"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One tick, for the audit log, the screen and the report."""

    time: float  # Unix time
    outcome: Outcome
    observation: Observation | None = None
    reason: str = ""  # the policy's
    wanted: Mapping[str, object] = field(default_factory=dict)
    changes: Mapping[str, float | int] = field(default_factory=dict)  # what the guard left of it
    refusals: tuple[Refusal, ...] = ()
    knobs: Mapping[str, float | int] = field(default_factory=dict)  # effective, at the end of the tick
    revision: int | None = None
    proposals: tuple[RestartProposal, ...] = ()
    is_step_back: bool = False  # `changes` are the guard's, not the policy's

    def as_dict(self) -> dict[str, object]:
        return {
            "time": round(self.time, 3),
            "outcome": self.outcome.value,
            "reason": self.reason,
            "wanted": {name: repr(value) for name, value in self.wanted.items()},
            "changes": dict(self.changes),
            "constraints": [
                {"reason": refusal.reason.value, "knob": refusal.knob, "detail": refusal.detail}
                for refusal in self.refusals
            ],
            "knobs": dict(self.knobs),
            "revision": self.revision,
            "proposals": [asdict(proposal) for proposal in self.proposals],
            "step_back": self.is_step_back,
            "window": self.observation.as_dict() if self.observation else None,
        }

    def __str__(self) -> str:
        moved = ", ".join(f"{name} -> {value:g}" for name, value in self.changes.items())
        held = "; ".join(str(refusal) for refusal in self.refusals)
        proposed = "; ".join(str(proposal) for proposal in self.proposals)
        return " | ".join(part for part in (self.outcome, moved, self.reason, held, proposed) if part)


def inputs_as_dict(inputs: Inputs) -> dict[str, Any]:
    """Plain values to the last digit, so that a decision can be taken again; see `inputs_from_dict`."""
    return _jsonable(asdict(inputs))


def inputs_from_dict(values: Mapping[str, Any]) -> Inputs:
    """What `inputs_as_dict` gave, also after a round trip through JSON. Raises ConfigError."""
    try:
        plain = _from_jsonable(dict(values))
        state, control, seen = plain["state"], plain["control"], plain["observation"]
        bounds = {name: KnobBounds(**limit) for name, limit in state["bounds"].items()}
        allowed = {name: (pair[0], pair[1]) for name, pair in control["allowed"].items()}
        return Inputs(
            **{
                **plain,
                "control": Control(**{**control, "mode": Mode(control["mode"]), "allowed": allowed}),
                "state": KnobState(**{**state, "bounds": bounds}),
                "observation": None if seen is None else Observation(**seen),
                "problems": tuple(refusal_from(entry) for entry in plain["problems"]),
            }
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"input={dict(values)!r:.80} is not what this version wrote: {error!r}") from error


def refusal_from(entry: Any) -> Refusal:
    reason, knob, detail = entry
    return Refusal(Reason(reason), knob, detail)


def memory_as_dict(memory: Memory) -> dict[str, Any]:
    return _jsonable(memory.as_dict())


def memory_from_dict(values: Mapping[str, Any]) -> Memory:
    return Memory.from_dict(_from_jsonable(dict(values)))


NON_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def _jsonable(value: Any) -> Any:
    """JSON has no NaN: {"float": "nan"} stands for it."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, dict):
        return {name: _jsonable(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(entry) for entry in value]
    return value


def _from_jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"float"}:
            return NON_FINITE[value["float"]]
        return {name: _from_jsonable(entry) for name, entry in value.items()}
    if isinstance(value, list):
        return [_from_jsonable(entry) for entry in value]
    return value
