"""What the engine is made to do while it is measured: a designed grid over batch, context, level and chunk."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import cycle
from math import ceil

import numpy as np

from kvpilot.engine.config import MAX_TTL_SECONDS, EngineConfig, Knobs
from kvpilot.engine.kv.formats import PageShape, payload_bytes
from kvpilot.engine.request import SamplingParams
from kvpilot.engine.step_features import StepFeatures
from kvpilot.env.calibration.measured import MeasuredEngine, MeasuredStep


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Every trial lets `batch` sequences with `context` cached tokens each decode, then prefills a chunk beside
    them. At every level of the ladder; sequences read pages of their own, as they would in service."""

    batches: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    contexts: tuple[int, ...] = (64, 256, 768)
    chunks: tuple[int, ...] = (2, 8, 24, 64, 128, 256)
    decode_steps: int = 6
    warm_up_steps: int = 2  # of each trial: the first steps after a change of shape
    repeats: int = 1

    @property
    def trials(self) -> list[tuple[int, int]]:
        return [(batch, context) for context in self.contexts for batch in self.batches]

    def envelope(self, shape: PageShape, ladder: tuple[str, ...], prefill_chunk: int) -> EngineConfig:
        """A pool that holds all contexts at full precision, and what the chunks leave behind."""
        base = max(self.batches) * ceil(max(self.contexts) / shape.page_size)
        extra = self.repeats * len(ladder) * len(self.trials) * ceil(max(self.chunks) / shape.page_size)
        slots = base + min(extra, base) + 4 * max(self.batches) + 16
        return EngineConfig(
            pool_bytes=slots * payload_bytes(ladder[0], shape),
            page_size=shape.page_size,
            ladder=ladder,
            max_batch_ceiling=max(self.batches) + 1,
            prefill_chunk=prefill_chunk,
            reserve_fraction=0.0,
            # everything idle is protected: pages are stepped down when the grid says so, and none is released
            knobs=Knobs(ttl_seconds=MAX_TTL_SECONDS, size_factor=1.0, max_batch=max(self.batches) + 1),
        )


QUICK = Grid(batches=(1, 2, 4, 8), contexts=(64, 256), chunks=(8, 64, 256), decode_steps=3, warm_up_steps=1)
# Shorter chunks are bound by launches on a GPU, however few tokens they have: no profile can say that
GPU = Grid(
    batches=(1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128),
    contexts=(256, 1024, 4096),
    chunks=(512, 1024, 2048),
)
GPU_QUICK = Grid(
    batches=(1, 4, 16), contexts=(256, 1024), chunks=(512, 1024), decode_steps=3, warm_up_steps=1
)


class GridRun:
    """Runs a grid on an engine of `grid.envelope`; yields the measured steps, `progress` gets the share done."""

    def __init__(
        self,
        engine: MeasuredEngine,
        grid: Grid,
        vocab_size: int,
        seed: int,
        progress: Callable[[float], None],
    ) -> None:
        self._engine = engine
        self._grid = grid
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)
        self._progress = progress
        self._num_requests = 0
        self._done = 0.0
        page = engine.config.page_size
        self._contexts = [self._tokens(max(grid.contexts) // page * page) for _ in range(max(grid.batches))]

    def steps(self) -> Iterator[MeasuredStep]:
        levels = len(self._engine.config.ladder)
        total = len(self._contexts) / 2 + levels * self._grid.repeats * len(self._grid.trials)
        self._submit([*self._contexts[0][:-1], 1], 8)  # warms up the process
        for _ in self._drain():
            pass
        for context in self._contexts:
            self._submit([*context, 1], 1)
            yield from self._drain()
            self._advance(0.5 / total)
        chunks = cycle(self._grid.chunks)
        for level in range(levels):
            if level:
                yield from self._step_down(level)
            for _ in range(self._grid.repeats):
                for batch, context in self._shuffled(self._grid.trials):
                    yield from self._trial(batch, context, next(chunks))
                    self._advance(1 / total)

    def _trial(self, batch: int, context: int, chunk: int) -> Iterator[MeasuredStep]:
        engine, page = self._engine, self._engine.config.page_size
        length = max(context // page, 1) * page
        ids = [self._submit([*self._contexts[k][:length], 1], page - 2) for k in range(batch)]
        engine.step()  # admits, and computes the one token that is not cached
        for k in range(self._grid.warm_up_steps + self._grid.decode_steps):
            engine.step()
            if k >= self._grid.warm_up_steps and engine.last:
                yield engine.last
        ids.append(self._submit([*self._contexts[-1][:length], *self._tokens(chunk)], 2))
        for k in range(3):  # prefill beside them, then one decode step more
            engine.step()
            if engine.last and (k == 0 or engine.last.kind == "mixed"):
                yield engine.last
        for request_id in ids:
            engine.abort(request_id)
        ids = [self._submit([*self._contexts[batch - 1][:length], *self._tokens(chunk)], 1)]
        yield from self._drain()

    def _step_down(self, level: int) -> Iterator[MeasuredStep]:
        """All idle pages one rung down, a few at a time, each time measured."""
        engine = self._engine
        engine.patch_knobs({"kv_level": level})
        engine.scheduler.set_knobs(engine.knobs.requested, engine.clock())
        nothing = (0,) * len(engine.config.ladder)
        while True:
            start = time.perf_counter()
            has_more = engine.cache.reclaim(engine.pool.available_slots + 4, engine.clock())
            engine.settle()
            seconds = time.perf_counter() - start
            read = engine.features.read([])
            features = StepFeatures(0, 0, 0, 0, 0, nothing, read.converted, read.moved_bytes)
            if any(features.converted):
                yield MeasuredStep(features, seconds, "convert", False)
            if not has_more:
                return

    def _drain(self) -> Iterator[MeasuredStep]:
        while self._engine.has_work():
            self._engine.step()
            if self._engine.last:
                yield self._engine.last

    def _submit(self, prompt: list[int], max_tokens: int) -> str:
        request_id = f"grid-{self._num_requests}"
        self._num_requests += 1
        self._engine.add_request(request_id, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
        return request_id

    def _tokens(self, count: int) -> list[int]:
        return self._rng.integers(0, self._vocab_size, count).tolist()

    def _shuffled(self, trials: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """A machine that slows down on the way must not look like a long context."""
        return [trials[k] for k in self._rng.permutation(len(trials))]

    def _advance(self, share: float) -> None:
        self._done += share
        self._progress(min(self._done, 1.0))
