"""Decisions in the process's log: each kind is said once, and counted while nothing else happens."""

import logging
from typing import Any

from kvpilot.agent.control.nouns import Decision, Outcome

log = logging.getLogger("kvpilot.agent")
SILENT_SECONDS = 3600.0  # a kind that lasts is said again after so long
WITHOUT_EFFECT = {Outcome.HELD, Outcome.ADVISED, Outcome.KEPT}


class DecisionLog:
    """The audit log has every decision; this one is for a reader who wants to see what is new."""

    def __init__(self) -> None:
        self._kind: tuple[Any, ...] | None = None
        self._said = 0.0  # when, in Unix time
        self._unsaid = 0  # decisions of this kind since then

    def say(self, decision: Decision, level: int) -> None:
        kind = _kind(decision, level)
        lasts = kind is not None and kind == self._kind
        if lasts and decision.time - self._said < SILENT_SECONDS:
            self._unsaid += 1
            return
        if self._unsaid and not lasts:
            log.info("the line before stood for %d more", self._unsaid)
        count = f" | {self._unsaid + 1} times since the line before" if self._unsaid else ""
        log.log(level, "%s%s", decision, count if lasts else "", extra={"decision": decision})
        self._kind, self._said, self._unsaid = kind, decision.time, 0


def _kind(decision: Decision, level: int) -> tuple[Any, ...] | None:
    """Equal for decisions that say the same in other numbers; None for one that has changed something."""
    if decision.outcome not in WITHOUT_EFFECT:
        return None
    held = tuple((refusal.reason, refusal.knob) for refusal in decision.refusals)
    return level, decision.outcome, tuple(decision.changes.items()), held, decision.proposals
