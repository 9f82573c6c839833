"""What the loop may do just now, and that it is said whenever it changes."""

import logging
from collections.abc import Callable
from typing import Protocol

from kvpilot.agent.control.audit import AuditError
from kvpilot.agent.control.nouns import Control

log = logging.getLogger("kvpilot.agent")


class Audit(Protocol):
    """AuditLog is the one on disk."""

    def write(self, record: dict[str, object]) -> None: ...


class Standing:
    """Told at every tick, whether or not a decision is due; tells log and audit log of changes."""

    def __init__(self, audit: Audit, unix_clock: Callable[[], float]) -> None:
        self._audit, self._unix_clock = audit, unix_clock
        self._on_record: dict[str, object] | None = None
        self.control: Control | None = None  # at the last tick

    def follow(self, control: Control) -> Control:
        _say_news(self.control, control)
        self.control = control
        self._record(control)
        return control

    def _record(self, control: Control) -> None:
        """A line in the audit log whenever what may be done changes: in mode off there is no other."""
        standing = {
            "mode": control.mode.value,
            "acts": control.acts,
            "killed": control.killed,
            "hold": control.hold,
        }
        if standing == self._on_record:
            return
        try:
            self._audit.write({"kind": "control", "time": round(self._unix_clock(), 3), **standing})
            self._on_record = standing
        except AuditError as error:  # again at the next tick; without a log nothing is changed anyway
            log.warning("%s", error)


def _say_news(before: Control | None, control: Control) -> None:
    if before is None or (before.mode, before.acts) != (control.mode, control.acts):
        written = "decisions are written" if control.acts else "nothing is written"
        log.warning("mode %s: %s", control.mode, written)
    for name, was, now in (
        ("killed", before.killed if before else "", control.killed),
        ("on hold", before.hold if before else "", control.hold),
    ):
        if was != now:
            log.warning("%s: %s", name if now else f"no longer {name}", now or was)
