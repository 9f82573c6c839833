"""What the loop may do just now: its configuration, the operator's control document, the kill switches."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from kvpilot.agent.control.nouns import Control, Mode
from kvpilot.agent.guard.changes import Allowed
from kvpilot.k8s.control_document import ControlDocument
from kvpilot.k8s.document_source import DocumentSource

KILL_VARIABLE = "KVPILOT_KILL"


class Switches:
    """Called at every tick. The kill switches need nobody but the file system."""

    def __init__(
        self,
        *,
        mode: Mode = Mode.ADVISORY,
        bounds: Allowed | None = None,
        kill_file: Path | None = None,
        document: DocumentSource | None = None,
        pod_name: str | None = None,
        on_document: Callable[[ControlDocument], None] | None = None,
        environment: Mapping[str, str] = os.environ,
    ) -> None:
        self.mode, self.bounds, self.kill_file, self.pod_name = mode, dict(bounds or {}), kill_file, pod_name
        self.document, self.on_document, self.environment = document, on_document, environment

    def __call__(self) -> Control:
        killed = self._kill_switch()
        if self.document is None:
            acts = self.mode is Mode.AUTO and not killed
            return Control(mode=self.mode, acts=acts, killed=killed, allowed=self.bounds)
        if self.document.refresh() and self.on_document is not None:
            assert self.document.document is not None
            self.on_document(self.document.document)
        given = self.document.document
        if given is None:
            return Control(killed=killed, hold=self.document.problem, allowed=self.bounds)
        killed = killed or ("the control document says kill" if given.kill else "")
        return Control(
            mode=Mode(given.mode),
            acts=given.mode_of(self.pod_name) == "auto" and not killed,
            killed=killed,
            hold=given.hold or self.document.problem,
            allowed=intersection(self.bounds, given.bounds.by_knob()),
        )

    def _kill_switch(self) -> str:
        if self.environment.get(KILL_VARIABLE, "").lower() not in ("", "0", "false", "no"):
            return f"the environment says {KILL_VARIABLE}"
        if self.kill_file is not None and os.path.lexists(self.kill_file):
            return f"{self.kill_file} exists"
        return ""


def intersection(one: Allowed, other: Allowed) -> dict[str, tuple[float | None, float | None]]:
    """Bounds that hold both; None is no bound."""

    def tighter(pick: Callable[..., float], *ends: float | None) -> float | None:
        given = [end for end in ends if end is not None]
        return pick(given) if given else None

    unbounded = (None, None)
    return {
        name: (
            tighter(max, one.get(name, unbounded)[0], other.get(name, unbounded)[0]),
            tighter(min, one.get(name, unbounded)[1], other.get(name, unbounded)[1]),
        )
        for name in {**one, **other}
    }
