"""Replays a trace through the simulated engine, as far as asked, with knobs that may change on the way."""

from collections.abc import Callable, Mapping
from math import inf
from typing import NamedTuple

from kvpilot.engine.collection import no_collection
from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import EngineFullError, RequestError
from kvpilot.engine.kv.eviction import EvictionPolicy
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.request import Request
from kvpilot.env.simulator.clock import VirtualClock
from kvpilot.env.simulator.engine import SimulatedEngine
from kvpilot.env.simulator.latency import LatencyProfile
from kvpilot.env.traces.trace import Trace


class Refusal(NamedTuple):
    """A request the engine did not take: its row in the trace and why."""

    row: int
    reason: str


class Simulation:
    """A trace in pages of `config.page_size` against an engine of this envelope on a virtual clock.

    `finished` grows with every request that ends, in order; `row_of(request)` is its row in the trace.
    Requests that can never fit or find the queue full are refused, as by the engine, and listed.
    """

    def __init__(
        self,
        trace: Trace,
        config: EngineConfig,
        shape: PageShape,
        profile: LatencyProfile,
        *,
        policy: EvictionPolicy | None = None,
        model_max_len: int = 1 << 30,
        quality_loss: Mapping[str, float] | None = None,
    ) -> None:
        same_size = trace.block_size == config.page_size
        self.trace = trace if same_size else trace.with_block_size(config.page_size)
        self.clock = VirtualClock()
        self.engine = SimulatedEngine(
            config,
            shape,
            profile,
            self.clock,
            policy=policy,
            model_max_len=model_max_len,
            quality_loss=dict(quality_loss or {}),
        )
        self.finished: list[Request] = []
        self.refused: list[Refusal] = []
        self._arrivals: list[float] = self.trace.arrival_seconds.tolist()
        self._next_row = 0

    @property
    def is_done(self) -> bool:
        """All requests have arrived and ended."""
        return self._next_row == len(self._arrivals) and not self.engine.has_work()

    def run(self, until: float = inf, on_progress: Callable[[int], None] | None = None) -> None:
        """Simulate up to the first step that would start at `until` or later; `on_progress` gets rows arrived."""
        with no_collection():  # it would go through every page and find no cycles
            self._run_until(until, on_progress)

    def _run_until(self, until: float, on_progress: Callable[[int], None] | None) -> None:
        engine, clock = self.engine, self.clock
        while not self.is_done and clock.now < until:
            if self._submit_due() and on_progress:
                on_progress(self._next_row)
            arrival = self._next_arrival()
            if engine.has_work():
                self._note_ended(engine.advance(min(arrival, until)))
            else:
                clock.now = min(arrival, until)
        if clock.now < until < inf:
            clock.now = until

    @staticmethod
    def row_of(request: Request) -> int:
        return int(request.request_id)

    def arrival_of(self, row: int) -> float:
        return self._arrivals[row]

    def _next_arrival(self) -> float:
        return self._arrivals[self._next_row] if self._next_row < len(self._arrivals) else inf

    def _note_ended(self, requests: list[Request]) -> None:
        self.finished += requests

    def _submit_due(self) -> int:
        """Hand over what has arrived by now; the number of requests."""
        first = self._next_row
        while self._next_row < len(self._arrivals) and self._arrivals[self._next_row] <= self.clock.now:
            self._submit(self._next_row)
            self._next_row += 1
        return self._next_row - first

    def _submit(self, row: int) -> bool:
        prompt, output = int(self.trace.prompt_tokens[row]), int(self.trace.output_tokens[row])
        blocks: list[int] = self.trace.reply_blocks(row).tolist()
        return self._offer(row, prompt, output, arrival=self._arrivals[row], blocks=blocks)

    def _offer(
        self, number: int, prompt_tokens: int, output_tokens: int, *, arrival: float, blocks: list[int]
    ) -> bool:
        """Hand one request to the engine, by its number; False if it refuses, which is noted."""
        request = Request(
            request_id=str(number),
            num_prompt_tokens=prompt_tokens,
            max_tokens=output_tokens,
            arrival_time=arrival,
            block_hash=blocks.__getitem__,
        )
        try:
            self.engine.submit(request)
        except (RequestError, EngineFullError) as error:
            self.refused.append(Refusal(number, str(error)))
            return False
        return True
