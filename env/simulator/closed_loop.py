"""Sessions in closed loop: the next turn is sent when the answer before has come and its user has thought."""

import heapq
from collections import deque
from math import inf

import numpy as np

from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.request import Request
from kvpilot.env.simulator.latency import LatencyProfile
from kvpilot.env.simulator.simulation import Simulation
from kvpilot.env.traces.trace import Trace

START_SPREAD_SECONDS = 60.0  # users do not all begin at once


class ClosedLoopSimulation(Simulation):
    """`users` work through the sessions of a trace, in order of their start, each one session after the other.

    Turns are serial; the recorded arrivals only order them. A slow engine is asked less, as by real users. Where a
    turn is refused, its user goes on to the next session. Raises ConfigError unless the trace has think times.
    """

    def __init__(
        self,
        trace: Trace,
        config: EngineConfig,
        shape: PageShape,
        profile: LatencyProfile,
        *,
        users: int,
        seed: int = 0,
        **options: object,
    ) -> None:
        if not trace.closed_loop:
            raise ConfigError("the trace has no think_seconds: it cannot be replayed in closed loop")
        super().__init__(trace, config, shape, profile, **options)  # pyright: ignore[reportArgumentType]
        self._arrivals = [inf] * len(self.trace)
        self._sessions = deque(self._rows_by_session())
        self._left: dict[int, deque[int]] = {}  # rows to come, by the row under way
        self._pending: list[tuple[float, int]] = []
        starts = np.sort(np.random.default_rng(seed).uniform(0, START_SPREAD_SECONDS, users))
        for start in starts.tolist():
            self._begin_session(start)

    @property
    def is_done(self) -> bool:
        return not self._pending and not self.engine.has_work()

    def _rows_by_session(self) -> list[deque[int]]:
        rows: dict[int, deque[int]] = {}
        for row, session in enumerate(self.trace.session.tolist()):
            rows.setdefault(session, deque()).append(row)
        return list(rows.values())

    def _begin_session(self, at: float) -> None:
        if self._sessions:
            self._push(self._sessions.popleft(), at)

    def _push(self, rows: deque[int], at: float) -> None:
        row = rows.popleft()
        self._arrivals[row] = at
        self._left[row] = rows
        heapq.heappush(self._pending, (at, row))

    def _next_arrival(self) -> float:
        return self._pending[0][0] if self._pending else inf

    def _note_ended(self, requests: list[Request]) -> None:
        super()._note_ended(requests)
        for request in requests:
            rows = self._left.pop(self.row_of(request))
            if rows:
                think = float(self.trace.think_seconds[rows[0]])
                self._push(rows, self.clock.now + think)
            else:
                self._begin_session(self.clock.now)

    def _submit_due(self) -> int:
        num = 0
        while self._pending and self._pending[0][0] <= self.clock.now:
            at, row = heapq.heappop(self._pending)
            num += 1
            self._next_row += 1
            if not self._submit(row):
                del self._left[row]
                self._begin_session(max(at, self.clock.now) + 1.0)
        return num
