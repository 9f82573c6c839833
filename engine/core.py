"""What an engine does, compiled where that is possible (see engine/compiled.py)."""

import time
from collections.abc import Callable, Mapping
from math import ceil
from typing import ClassVar

from kvpilot.engine.compiled import mypyc_attr
from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import ConfigError, EngineFullError, RequestError
from kvpilot.engine.knobs import KnobPatch, KnobState, KnobStore
from kvpilot.engine.kv.cache import KVCache
from kvpilot.engine.kv.eviction import POLICIES, EvictionPolicy
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.hashing import TokenChain
from kvpilot.engine.kv.page import PageState
from kvpilot.engine.kv.pool import KVPool
from kvpilot.engine.kv.storage import PageStorage
from kvpilot.engine.request import (
    FinishReason,
    Request,
    SampledToken,
    SamplingParams,
    ScheduledRequest,
    StepOutput,
)
from kvpilot.engine.runners.base import Runner
from kvpilot.engine.scheduler import Scheduler
from kvpilot.engine.stats import Series, StatsRecorder, StatsSnapshot


@mypyc_attr(allow_interpreted_subclasses=True)
class EngineCore:
    """Schedule, run, commit. One thread adds requests and steps; knobs and snapshots are safe from any thread.

    `quality_loss` is the measured mean KL (nats per token) of each codec against an exact cache, where known.
    """

    # What it is made of: a subclass may name its own
    cache_class: ClassVar[type[KVCache]] = KVCache
    scheduler_class: ClassVar[type[Scheduler]] = Scheduler

    def __init__(
        self,
        config: EngineConfig,
        shape: PageShape,
        runner: Runner,
        storage: PageStorage,
        *,
        model_max_len: int = 1 << 30,
        quality_loss: Mapping[str, float] | None = None,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if policy is None and config.eviction not in POLICIES:
            raise ConfigError(
                f"eviction={config.eviction!r} is invalid: expected {' or '.join(POLICIES)} "
                "(an order that knows the future exists in the simulator only)"
            )
        self.config = config
        self.clock = clock
        self.pool = KVPool(shape=shape, ladder=config.ladder, pool_bytes=config.pool_bytes, storage=storage)
        self.max_model_len = self._check_max_model_len(model_max_len)
        self.stats = StatsRecorder()
        self.cache = self.cache_class(
            self.pool,
            policy or POLICIES[config.eviction](),
            config.knobs,
            self.stats,
            tail_pages=ceil(config.tail_tokens / config.page_size),
        )
        self.scheduler = self.scheduler_class(
            config, self.cache, self.stats, max_model_len=self.max_model_len
        )
        self.knobs = KnobStore(config)
        self._runner = runner
        self._quality_loss = dict(quality_loss or {})
        self._requests: dict[str, Request] = {}
        self.is_reclaiming = False  # the next step has work for the background reclaimer
        self._step_seconds = 0.1  # moving average, for Retry-After

    def _check_max_model_len(self, model_max_len: int) -> int:
        """Any one request must fit alone at full precision: that is what guarantees progress."""
        fits = (self.pool.num_slots - 2 * self.pool.last_level) * self.config.page_size
        wanted = self.config.max_model_len
        if wanted is None:
            return min(model_max_len, fits)
        if wanted > min(model_max_len, fits):
            raise ConfigError(
                f"max_model_len={wanted} is invalid: the model allows {model_max_len}, "
                f"pool_bytes={self.config.pool_bytes} holds {fits} tokens at {self.config.ladder[0]}"
            )
        return wanted

    # ------------------------------------------------------------------ requests
    def add_request(
        self,
        request_id: str,
        prompt: list[int],
        sampling: SamplingParams,
        *,
        cache_salt: str = "",
        arrival_time: float | None = None,
        max_kv_level: int | None = None,
    ) -> Request:
        """Queue a request. Raises RequestError if it can never be served, EngineFullError if the queue is full.

        `max_kv_level` is the coarsest level that its pages may have while it runs (None: as the knob says).
        """
        tokens = list(prompt)
        request = Request(
            request_id=request_id,
            num_prompt_tokens=len(tokens),
            max_tokens=sampling.max_tokens,
            arrival_time=self.clock() if arrival_time is None else arrival_time,
            block_hash=TokenChain(tokens, self.config.page_size, cache_salt),
            sampling=sampling,
            tokens=tokens,
            max_kv_level=max_kv_level,
        )
        self.submit(request)
        return request

    def submit(self, request: Request) -> None:
        """`add_request` for a request that is made already; the simulator's have no tokens."""
        num_prompt = request.num_prompt_tokens
        if num_prompt < 1:
            raise RequestError("prompt is empty: expected at least one token", "prompt")
        if num_prompt >= self.max_model_len:
            limit = f"fewer than {self.max_model_len} (context of this engine)"
            raise RequestError(f"prompt has {num_prompt} tokens: expected {limit}", "prompt")
        self._check_max_kv_level(request.max_kv_level)
        if request.request_id in self._requests:
            raise RequestError(f"request_id={request.request_id!r} is in use", "request_id")
        waiting = len(self.scheduler.waiting)
        if waiting >= self.config.max_waiting:
            self.stats.add("requests_rejected")
            raise EngineFullError(f"the queue is full ({waiting} requests waiting)", self._retry_after())
        self._requests[request.request_id] = request
        self.scheduler.add(request)

    def _check_max_kv_level(self, level: int | None) -> None:
        if level is None or 0 <= level <= self.pool.last_level:
            return
        levels = ", ".join(f"{i} is {codec}" for i, codec in enumerate(self.pool.ladder))
        raise RequestError(
            f"max_kv_level={level} is invalid: expected 0 to {self.pool.last_level}, the coarsest level that the "
            f"request's KV pages may have ({levels}), or leave it out for no limit of its own",
            "max_kv_level",
        )

    def abort(self, request_id: str) -> None:
        """End a request whose client went away; unknown ids are ignored."""
        self.finish(request_id, FinishReason.ABORT)

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """End a request from outside, e.g. at a stop string; unknown ids are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.finish_reason is None:  # a failed step may have ended it already
            self.scheduler.finish(request, reason, self.clock())

    def has_work(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def _retry_after(self) -> float:
        """Seconds until a seat is likely free: the remaining work of the running requests, spread over them."""
        running = self.scheduler.running
        left = sorted(request.max_tokens - request.num_output_tokens for request in running)
        return min(max(1.0, (left[0] if left else 1) * self._step_seconds), 60.0)

    # ------------------------------------------------------------------ the loop
    def step(self) -> list[StepOutput]:
        """One step: schedule, run, commit."""
        start = self.clock()
        self._apply_knobs(start)
        batch = self.scheduler.schedule(start)
        if not batch:
            return []
        self.is_reclaiming = self.cache.reclaim_in_background(self.scheduler.reserve_slots, start)
        sampled, repeats = self._run(batch, start)
        now = self.clock()
        outputs = self.scheduler.commit(batch, sampled, now, repeats)
        for output in outputs:
            if output.finish_reason is not None:
                del self._requests[output.request.request_id]
        self._book_steps((now - start) / repeats, repeats)
        return outputs

    def _run(self, batch: list[ScheduledRequest], start: float) -> tuple[list[SampledToken | None], int]:
        """The step's tokens, and how many equal steps they stand for: one, but for the simulator."""
        return self._runner.execute(batch), 1

    def _apply_knobs(self, now: float) -> None:
        requested = self.knobs.requested
        if requested is not self.scheduler.knobs:
            self.scheduler.set_knobs(requested, now)

    def _book_steps(self, seconds: float, times: int) -> None:
        self.stats.add("steps", times)
        self.stats.observe("step_seconds", seconds, times)
        self._step_seconds += 0.1 * (seconds - self._step_seconds)

    # ------------------------------------------------------------------ knobs
    def patch_knobs(self, changes: dict[str, object], expected_revision: int | None = None) -> KnobPatch:
        """Change knobs from the next step on. Raises KnobInvalidError or KnobStaleError; then nothing changed."""
        return self.knobs.patch(changes, expected_revision, len(self.scheduler.running))

    def knob_state(self) -> KnobState:
        return self.knobs.state(len(self.scheduler.running))

    # ------------------------------------------------------------------ statistics
    def snapshot(self) -> StatsSnapshot:
        """Counters, gauges and histograms now. Reads only, so it never waits for a step."""
        now = self.clock()
        return self.stats.snapshot(
            now, {**self._request_gauges(now), **self._pool_gauges(), **self._knob_series()}
        )

    def _request_gauges(self, now: float) -> dict[Series, float]:
        waits = [now - request.arrival_time for request in tuple(self.scheduler.waiting)]
        return {
            ("requests_running", ()): len(self.scheduler.running),
            ("requests_waiting", ()): len(waits),
            ("waiting_mean_seconds", ()): sum(waits) / len(waits) if waits else 0.0,
            ("waiting_oldest_seconds", ()): max(waits, default=0.0),
        }

    def _pool_gauges(self) -> dict[Series, float]:
        pool, slots = self.pool, self.pool.slots
        gauges: dict[Series, float] = {
            ("pool_bytes", ()): slots.num_slots * slots.slot_bytes,
            ("pool_free_bytes", ()): slots.num_free * slots.slot_bytes,
            ("pages_moved", ()): pool.num_moved,
        }
        for level, codec in enumerate(pool.ladder):
            gauges["pool_capacity_tokens", (codec,)] = pool.capacity_pages(level) * self.config.page_size
            if level == 0 or codec in self._quality_loss:  # what was not measured is absent, not zero
                gauges["kv_quality_loss", (codec,)] = self._quality_loss.get(codec, 0.0)
            for state in PageState:
                num = pool.num_pages(state, level)
                gauges["pages", (state.name.lower(), codec)] = num
                gauges["page_bytes", (state.name.lower(), codec)] = num * pool.page_bytes[level]
        return gauges

    def _knob_series(self) -> dict[Series, float]:
        state = self.knob_state()
        series: dict[Series, float] = {("knob_revision", ()): state.revision}
        for name, value in state.effective.as_dict().items():
            series["knob", (name,)] = value
            series["knob_changes", (name,)] = self.knobs.num_changes[name]
        return series

    def check_integrity(self) -> None:
        """Raise PoolIntegrityError unless pool, cache and requests agree."""
        self.cache.check_integrity()
        self.scheduler.check_integrity()
