"""Traffic of an episode: sessions in open loop, users in closed loop, one-off prompts, at levels that change."""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from math import inf

import numpy as np

from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.request import Request
from kvpilot.env.simulator.latency import LatencyProfile
from kvpilot.env.simulator.simulation import Simulation
from kvpilot.env.traces.trace import TraceError
from kvpilot.env.tuning.schedule import Schedule, check_schedule, draw_times
from kvpilot.env.tuning.sessions import SessionTable

LOOPS = ("closed", "open", "one-off")
JOIN_SECONDS = 60.0  # users do not all come at once
RETRY_SECONDS = 1.0  # a refused user goes on to the next session


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Sessions of one file. What `level` counts depends on `loop`:

    closed   users, each in one session after the other; the next turn is sent when the answer has come and the
             recorded think time has passed. Who joins resumes a session at any turn of it.
    open     sessions started per second (Poisson), with the recorded time between their turns.
    one-off  as open, but of each session only the first request, which nothing follows.
    """

    file: str  # relative to the folder of traces
    loop: str
    level: Schedule

    def __post_init__(self) -> None:
        if self.loop not in LOOPS:
            raise ConfigError(f"loop={self.loop!r} is invalid: expected {', '.join(LOOPS)}")
        check_schedule(f"level of {self.file}", self.level)


@dataclass(eq=False)
class _Visit:
    """A session under way."""

    source: "_Source"
    rows: list[int]
    at: int  # index of the turn to send next
    copy: int
    slot: int | None = None  # the user's, in closed loop


class _Source:
    """Sessions of a stream in random order, as copies of themselves once all were used; and its users."""

    def __init__(self, index: int, table: SessionTable, split: str, seed: int) -> None:
        self.index, self.table = index, table
        self.rng = np.random.default_rng([seed, index])
        self._sessions = table.sessions(split)
        self._order: list[int] = []
        self._copy = -1
        self.present: list[bool] = []  # by slot: whether the user is to stay

    def visit(self, *, slot: int | None = None, resume: bool = False) -> _Visit:
        if not self._order:
            self._order = self.rng.permutation(len(self._sessions)).tolist()
            self._copy += 1
        rows = self._sessions[self._order.pop()]
        at = int(self.rng.integers(len(rows))) if resume else 0
        return _Visit(self, rows, at, self._copy, slot)


class TrafficSimulation(Simulation):
    """Streams against the simulated engine. The numbers of requests count submissions, not rows of a trace."""

    def __init__(
        self,
        streams: Sequence[Stream],
        tables: Sequence[SessionTable],
        config: EngineConfig,
        shape: PageShape,
        profile: LatencyProfile,
        *,
        split: str,
        seed: int,
        end_seconds: float,
        model_max_len: int = 1 << 30,
        quality_loss: Mapping[str, float] | None = None,
    ) -> None:
        nothing = tables[0].trace.select([])
        super().__init__(
            nothing, config, shape, profile, model_max_len=model_max_len, quality_loss=quality_loss
        )
        self._serial = count()
        self._order = count()  # of events at the same moment
        self._events: list[tuple[float, int, _Visit | tuple[_Source, int]]] = []
        self._visits: dict[str, _Visit] = {}  # by the request under way
        self.sources = [_Source(index, table, split, seed) for index, table in enumerate(tables)]
        for source, stream in zip(self.sources, streams, strict=True):
            if stream.loop == "closed":
                self._plan_users(source, stream)
            else:
                self._plan_sessions(source, stream, end_seconds)

    def _plan_users(self, source: _Source, stream: Stream) -> None:
        if not source.table.trace.closed_loop:
            raise TraceError(f"{stream.file}: has no think times: it cannot be replayed in closed loop")
        for second, users in stream.level:
            self._push(second, (source, round(users)))

    def _plan_sessions(self, source: _Source, stream: Stream, end_seconds: float) -> None:
        arrivals = source.table.arrival_seconds
        for start in draw_times(stream.level, end_seconds, source.rng).tolist():
            visit = source.visit()
            if stream.loop == "one-off":
                visit.rows = visit.rows[:1]
            first = arrivals[visit.rows[0]]
            for at, row in enumerate(visit.rows):
                self._push(start + arrivals[row] - first, _Visit(source, visit.rows, at, visit.copy))

    def _push(self, at: float, what: "_Visit | tuple[_Source, int]") -> None:
        heapq.heappush(self._events, (at, next(self._order), what))

    # ------------------------------------------------------------------ hooks of Simulation
    @property
    def is_done(self) -> bool:
        return not self._events and not self.engine.has_work()

    def _next_arrival(self) -> float:
        return self._events[0][0] if self._events else inf

    def _submit_due(self) -> int:
        num = 0
        while self._events and self._events[0][0] <= self.clock.now:
            at, _, what = heapq.heappop(self._events)
            if isinstance(what, tuple):
                self._set_users(at, *what)
            elif what.slot is None or what.source.present[what.slot]:
                self._send(at, what)
                num += 1
        return num

    def _note_ended(self, requests: list[Request]) -> None:
        super()._note_ended(requests)
        for request in requests:
            visit = self._visits.pop(request.request_id)
            if visit.slot is None or not visit.source.present[visit.slot]:
                continue
            visit.at += 1
            if visit.at < len(visit.rows):
                think = visit.source.table.think_seconds[visit.rows[visit.at]]
                self._push(self.clock.now + think, visit)
            else:
                self._push(self.clock.now, visit.source.visit(slot=visit.slot))

    # ------------------------------------------------------------------ parts
    def _set_users(self, at: float, source: _Source, users: int) -> None:
        """Who is to leave does so instead of the next turn; a slot is never used twice."""
        staying = [slot for slot, stays in enumerate(source.present) if stays]
        leaving = source.rng.permutation(staying)[: max(len(staying) - users, 0)]
        for slot in leaving.tolist():
            source.present[slot] = False
        for _ in range(users - len(staying)):
            source.present.append(True)
            joins = at + source.rng.uniform(0, JOIN_SECONDS)
            self._push(joins, source.visit(slot=len(source.present) - 1, resume=True))

    def _send(self, at: float, visit: _Visit) -> None:
        table, row, serial = visit.source.table, visit.rows[visit.at], next(self._serial)
        self._next_row += 1
        blocks = table.blocks(row, stream=visit.source.index, copy=visit.copy, serial=serial)
        prompt, output = table.prompt_tokens[row], table.output_tokens[row]
        if self._offer(serial, prompt, output, arrival=at, blocks=blocks):
            self._visits[str(serial)] = visit
        elif visit.slot is not None:
            next_at = max(at, self.clock.now) + RETRY_SECONDS
            self._push(next_at, visit.source.visit(slot=visit.slot))
