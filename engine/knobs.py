"""The live knobs: validated as a whole, applied atomically, with a revision that makes races visible."""

from dataclasses import replace
from threading import Lock
from typing import NamedTuple

from kvpilot.engine.config import KNOB_NAMES, EngineConfig, Knobs, validate_knobs
from kvpilot.engine.errors import KnobStaleError


class KnobPatch(NamedTuple):
    """Answer to a change: per knob `applied`, `deferred` (takes effect as the batch drains) or `unchanged`."""

    revision: int
    results: dict[str, str]


class KnobState(NamedTuple):
    """`effective` is what the engine does now; it differs from `requested` in the `deferred` knobs only."""

    revision: int
    effective: Knobs
    requested: Knobs
    deferred: tuple[str, ...]


class KnobStore:
    """Requested knobs and their revision. Safe to use from any thread."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._lock = Lock()
        self._requested = config.knobs
        self.revision = 1
        self.num_changes = dict.fromkeys(KNOB_NAMES, 0)

    @property
    def requested(self) -> Knobs:
        return self._requested

    def patch(self, changes: dict[str, object], expected_revision: int | None, num_running: int) -> KnobPatch:
        """Apply all changes or none. The revision rises when a value changes.

        Raises KnobInvalidError (unknown name, out of bounds) or KnobStaleError.
        """
        clean = validate_knobs(changes, self._config)
        with self._lock:
            if expected_revision is not None and expected_revision != self.revision:
                raise KnobStaleError(expected_revision, self.revision)
            results: dict[str, str] = {}
            for name, value in clean.items():
                if value == getattr(self._requested, name):
                    results[name] = "unchanged"
                    continue
                waits = name == "max_batch" and value < num_running
                results[name] = "deferred" if waits else "applied"
                self.num_changes[name] += 1
            if any(result != "unchanged" for result in results.values()):
                self._requested = replace(self._requested, **clean)  # pyright: ignore[reportArgumentType]
                self.revision += 1
            return KnobPatch(self.revision, results)

    def state(self, num_running: int) -> KnobState:
        with self._lock:
            requested, revision = self._requested, self.revision
        if num_running <= requested.max_batch:
            return KnobState(revision, requested, requested, ())
        return KnobState(revision, replace(requested, max_batch=num_running), requested, ("max_batch",))
