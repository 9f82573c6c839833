"""What to set the knobs to. A policy only wishes: who runs it decides what becomes of it."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from kvpilot.engine.config import KnobBounds
from kvpilot.env.observation import Observation

KnobValues = Mapping[str, float]


class Proposal(NamedTuple):
    """Wanted knob values (a subset; empty is "leave everything") and why, in words for the audit log."""

    knobs: Mapping[str, object]
    reason: str


class Policy(Protocol):
    """Called once per decision, in order. May keep state; must not block or do I/O."""

    name: str

    def reset(self) -> None:
        """Forget what was seen: another engine, or another episode."""
        ...

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal:
        """`observation` has every REQUIRED signal, finite. `knobs` are the requested values."""
        ...
