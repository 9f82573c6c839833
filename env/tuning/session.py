"""A running engine as environment, rollout and policies see it: simulated, or live."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Protocol

from kvpilot.engine.config import KnobBounds, knob_bounds
from kvpilot.engine.errors import KnobInvalidError, KVPilotError
from kvpilot.engine.stats import StatsSnapshot, StatsWindow
from kvpilot.env.simulator.simulation import Simulation


class SessionError(KVPilotError):
    """The engine behind a session restarted or does not answer: the window means nothing."""


class Session(Protocol):
    """One engine under traffic. `knobs` are the requested values."""

    @property
    def bounds(self) -> Mapping[str, KnobBounds]: ...

    @property
    def knobs(self) -> Mapping[str, float | int]: ...

    @property
    def is_done(self) -> bool:
        """There will be no further window."""
        ...

    def set_knobs(self, changes: Mapping[str, object]) -> None:
        """All or nothing, from the engine's next step on. Raises KnobInvalidError."""
        ...

    def advance(self, seconds: float) -> StatsWindow:
        """Let so much time pass; what happened since the call before."""
        ...


class SimulatedSession:
    """A simulation from where it stands, until `end_seconds` of its clock. Windows end on a grid: a step that
    runs over the end of one window shortens the next."""

    def __init__(
        self, simulation: Simulation, *, end_seconds: float = inf, due_seconds: float | None = None
    ) -> None:
        self.simulation = simulation
        self.end_seconds = end_seconds
        self._due = simulation.clock.now if due_seconds is None else due_seconds
        self.snapshot = simulation.engine.snapshot()  # at the end of the last window
        self._bounds = knob_bounds(simulation.engine.config)

    @property
    def bounds(self) -> Mapping[str, KnobBounds]:
        return self._bounds

    @property
    def knobs(self) -> Mapping[str, float | int]:
        return self.simulation.engine.knobs.requested.as_dict()

    @property
    def is_done(self) -> bool:
        return self._due >= self.end_seconds or self.simulation.is_done

    def set_knobs(self, changes: Mapping[str, object]) -> None:
        self.simulation.engine.patch_knobs(dict(changes))

    def advance(self, seconds: float) -> StatsWindow:
        self._due += seconds
        self.simulation.run(until=self._due)
        if self.simulation.clock.now < self._due:  # all is answered: time passes all the same
            self.simulation.clock.now = self._due
        start, self.snapshot = self.snapshot, self.simulation.engine.snapshot()
        return StatsWindow(start=start, end=self.snapshot)


class LiveEngine(Protocol):
    """What a live session needs of its engine, as `agent.control.client.EngineClient` has it."""

    def scrape(self) -> StatsSnapshot: ...

    def knobs(self) -> "LiveKnobs": ...

    def patch(self, knobs: Mapping[str, object], expected_revision: int | None = None) -> object: ...


class LiveKnobs(Protocol):
    @property
    def requested(self) -> Mapping[str, float | int]: ...

    @property
    def bounds(self) -> Mapping[str, KnobBounds]: ...


class LiveSession:
    """A running engine; real time passes. Raises SessionError where it fails or restarts."""

    is_done = False

    def __init__(self, engine: LiveEngine, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self._engine = engine
        self._sleep = sleep
        self._last = engine.scrape()
        state = engine.knobs()
        self._bounds, self._knobs = state.bounds, dict(state.requested)

    @property
    def bounds(self) -> Mapping[str, KnobBounds]:
        return self._bounds

    @property
    def knobs(self) -> Mapping[str, float | int]:
        return self._knobs

    def set_knobs(self, changes: Mapping[str, object]) -> None:
        with _as_session_error():
            if changes:
                self._engine.patch(changes)
            self._knobs = dict(self._engine.knobs().requested)

    def advance(self, seconds: float) -> StatsWindow:
        self._sleep(seconds)
        with _as_session_error():
            start, self._last = self._last, self._engine.scrape()
            self._knobs = dict(self._engine.knobs().requested)
        window = StatsWindow(start=start, end=self._last)
        if window.is_reset():
            raise SessionError("a counter went down: the engine restarted within this window; begin anew")
        return window


@contextmanager
def _as_session_error() -> Iterator[None]:
    """Whatever the connection makes of a failing engine; a refused knob stays what it is."""
    try:
        yield
    except KnobInvalidError:
        raise
    except KVPilotError as error:
        raise SessionError(str(error)) from error
