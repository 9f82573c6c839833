"""The runner for NVIDIA GPUs: decode steps are CUDA graphs, steps with prompts run op by op.

While the host books a decode step and schedules the next one, the GPU already computes that next step for the same
sequences: their tokens are on the GPU. What turns out otherwise (a sequence ended, another one came) costs at most
the part of the step that was computed in vain; the scheduler decides as it would without.

Shape suffixes: B sequences of a decode step, T tokens of a step, N rows that need logits, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvpilot.engine.attention import rope_tables
from kvpilot.engine.cuda_attention import CudaAttention, StepPlan
from kvpilot.engine.kernels.gpu import elementwise
from kvpilot.engine.kernels.gpu.convert import copy_first_tokens
from kvpilot.engine.kernels.gpu.decode import Scratch
from kvpilot.engine.kernels.gpu.draw import draw
from kvpilot.engine.kernels.gpu.upload import upload
from kvpilot.engine.kv.cuda_storage import CudaStorage
from kvpilot.engine.kv.pool import Page
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.request import Request, SampledToken, SamplingParams, ScheduledRequest
from kvpilot.engine.runners.graph_cache import GraphCache
from kvpilot.engine.runners.step_plan import DecodeInputs, Launch, choices, empty_chunk, mixed_plan
from kvpilot.engine.sampling import token_logprobs

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
BUCKET_STEP = 64  # beyond the last one
WARM_UP_TOKENS = 256  # of a prompt
GREEDY = SamplingParams()


def batch_buckets(ceiling: int) -> list[int]:
    """Sizes that decode steps are padded to: the last one is the ceiling."""
    sizes = [*BUCKETS, *range(BUCKETS[-1] + BUCKET_STEP, ceiling, BUCKET_STEP)]
    return [*(size for size in sizes if size < ceiling), ceiling]


@dataclass(kw_only=True)
class _Ahead:
    """A step that runs, or ran, before it was scheduled. `rows` are those of the drawn tokens."""

    rows: dict[Request, int] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    pages: list[list[Page]] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # rows of the step before, which drew its tokens
    tokens: list[int] = field(default_factory=list)  # those tokens, once they are known
    spares: list[int] = field(
        default_factory=list
    )  # where K and V went instead of a page to come; -1: to the page

    def row(self, entry: ScheduledRequest) -> int | None:
        """The entry's row, if this step is what is now wanted of it."""
        request, start, num_new, _ = entry
        row = self.rows.get(request)
        if row is None or num_new != 1 or self.starts[row] != start or self.pages[row] is not request.pages:
            return None
        assert request.tokens is not None
        return row if request.tokens[start] == self.tokens[row] else None


class CudaRunner:
    """One graph per bucket of batch sizes, lowest precision present, and whether pages are shared out. Everything
    else that may change between steps (pages, levels, lengths) is read from buffers at fixed addresses, so that no
    knob needs a new graph."""

    def __init__(
        self,
        model: Llama,
        storage: CudaStorage,
        *,
        max_sequences: int,
        max_tokens: int,
        looks_ahead: bool = True,
    ) -> None:
        """`max_tokens` is the longest sequence."""
        config, device = model.config, storage.device
        self._model = model
        self._storage = storage
        self._max_tokens = max_tokens
        self._looks_ahead = looks_ahead
        self._inputs = DecodeInputs(storage, max_sequences, max_tokens)
        scratch = Scratch.make(self._inputs.max_items, config.num_heads, config.head_dim, device)
        rope = rope_tables(config.rope_inverse_frequencies, max_tokens)
        self._attention = CudaAttention(config.num_heads, storage, rope, scratch)
        self._buckets = batch_buckets(max_sequences)
        self._logits_BV = torch.empty((max_sequences, config.vocab_size), dtype=model.dtype, device=device)
        self._drawn_B = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        on_gpu = device.type == "cuda"
        self._drawn_host_B = torch.zeros(max_sequences, dtype=torch.int64, pin_memory=on_gpu)
        self._drawn_event = torch.cuda.Event() if on_gpu else None
        self.graphs = GraphCache() if on_gpu else None
        self._ahead = _Ahead()
        self.num_ahead = 0  # steps that were found computed, at least in part

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int, int], None]) -> None:
        """Captures every graph and compiles every kernel, so that no step has to: `progress(done, total)`."""
        self._storage.warm_up()
        self._inputs.clear()
        launches = [launch for size in reversed(self._buckets) for launch in self._inputs.launches(size)]
        for done, launch in enumerate(launches, 1):
            self._run_decode(launch, replays=False)
            progress(done, len(launches))
        plan = empty_chunk(min(WARM_UP_TOKENS, self._max_tokens), self._inputs)
        logits_1V = self._model.logits(self._forward(torch.zeros_like(plan.positions_T), plan)[-1:])
        self._draw(logits_1V, torch.zeros((1, 4), device=logits_1V.device))

    @torch.inference_mode()
    def execute(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        ahead, self._ahead = self._ahead, _Ahead()
        self._storage.flush()
        found = [(entry, row) for entry in batch if (row := ahead.row(entry)) is not None]
        if not found:
            return self._execute_now(batch, looks_ahead=self._looks_ahead)
        self.num_ahead += 1
        self._keep(ahead, found)
        self._fetch()
        known = {entry.request for entry, _ in found}
        rest = [entry for entry in batch if entry.request not in known]
        if not rest and self._looks_ahead:
            self._run_ahead([entry for entry, _ in found], [row for _, row in found])
        tokens = self._fetched()
        results = {entry.request: SampledToken(tokens[row]) for entry, row in found}
        if rest:
            drawn = self._execute_now(rest, looks_ahead=False)  # the next step is for all of them again
            results |= {entry.request: token for entry, token in zip(rest, drawn, strict=True) if token}
        return [results.get(entry.request) for entry in batch]

    def _execute_now(self, batch: list[ScheduledRequest], *, looks_ahead: bool) -> list[SampledToken | None]:
        decodes = [entry for entry in batch if entry.num_new == 1]
        if len(decodes) < len(batch):
            return self._execute_mixed(batch, decodes)
        self._start_decode(decodes, self._inputs.tables.rows(decodes))
        if any(map(_needs_logits, decodes)):
            drawn = self._sample(self._logits_BV[: len(batch)].float(), [entry.request for entry in batch])
            return [token if entry.samples else None for token, entry in zip(drawn, batch, strict=True)]
        self._fetch()
        if looks_ahead:
            self._run_ahead(decodes, list(range(len(decodes))))
        tokens = self._fetched()[: len(batch)]
        return [
            SampledToken(token) if entry.samples else None for token, entry in zip(tokens, batch, strict=True)
        ]

    # ------------------------------------------------------------------ decode
    def _start_decode(
        self, decodes: list[ScheduledRequest], rows: list[int], sources: list[int] | None = None
    ) -> None:
        size = next(size for size in self._buckets if size >= len(decodes))
        self._run_decode(self._inputs.set(decodes, rows, size, sources))

    def _run_decode(self, launch: Launch, *, replays: bool = True) -> None:
        def compute() -> None:
            self._decode(launch)

        if self.graphs is None:
            compute()
            return
        version = (self._storage.pool.data_ptr(), id(self._model))
        graph = self.graphs.get(launch, version, compute)
        if replays:
            graph.replay()

    def _decode(self, launch: Launch) -> None:
        """Logits and drawn tokens of the buffers' first `size` sequences."""
        inputs, size = self._inputs, launch.size
        plan = StepPlan(
            positions_T=inputs.positions[:size],
            places_T2=inputs.places[:size],
            num_decodes=size,
            table=inputs.table(launch),
            chunks=None,
        )
        token_ids_B = elementwise.take_tokens(inputs.tokens[:size], inputs.sources[:size], self._drawn_B)
        hidden_BH = self._forward(token_ids_B, plan)
        self._model.write_logits(hidden_BH, self._logits_BV[:size])
        draw(self._logits_BV[:size], inputs.choices[:size], self._drawn_B[:size])

    def _fetch(self) -> None:
        """Begins to copy the drawn tokens to the host, before the next step draws others."""
        self._drawn_host_B.copy_(self._drawn_B, non_blocking=self._drawn_event is not None)
        if self._drawn_event is not None:
            self._drawn_event.record()

    def _fetched(self) -> list[int]:
        if self._drawn_event is not None:
            self._drawn_event.synchronize()
        tokens = self._drawn_host_B.tolist()
        self._ahead.tokens = [tokens[row] for row in self._ahead.sources]
        return tokens

    # ------------------------------------------------------------------ one step ahead
    def _run_ahead(self, batch: list[ScheduledRequest], rows: list[int]) -> None:
        """Starts the step after `batch` for those who will be in it, if all draws are known to the GPU.

        `rows` are those in which the batch's tokens are drawn.
        """
        if any(map(_needs_logits, batch)):
            return
        entries, sources = [], []
        for (request, start, _, samples), row in zip(batch, rows, strict=True):
            if (
                samples
                and request.num_output_tokens + 1 < request.max_tokens
                and start + 2 <= self._max_tokens
            ):
                entries.append(ScheduledRequest(request, start + 1, 1, True))
                sources.append(row)
        page_size = self._inputs.page_size
        lacks_page = [entry.start >= len(entry.request.pages) * page_size for entry in entries]
        if not entries or sum(lacks_page) > len(self._storage.spares):
            return
        spare = iter(self._storage.spares)
        spares = [next(spare) if lacks else -1 for lacks in lacks_page]
        table_rows = self._inputs.tables.rows(entries, [address for address in spares if address >= 0])
        self._start_decode(entries, table_rows, sources)
        self._ahead = _Ahead(
            rows={entry.request: i for i, entry in enumerate(entries)},
            starts=[entry.start for entry in entries],
            pages=[entry.request.pages for entry in entries],
            sources=sources,
            spares=spares,
        )

    def _keep(self, ahead: _Ahead, found: list[tuple[ScheduledRequest, int]]) -> None:
        """K and V that were written to spare pages go to the pages that their requests have got since."""
        page_size = self._inputs.page_size
        jobs = [
            (ahead.spares[row], entry.request.pages[entry.start // page_size].payload)
            for entry, row in found
            if ahead.spares[row] >= 0
        ]
        if jobs:
            jobs_N2 = upload(torch.tensor(jobs), self._storage.device)
            copy_first_tokens(self._storage.pool, self._storage.shape, jobs_N2)

    # ------------------------------------------------------------------ with prompts
    def _execute_mixed(
        self, batch: list[ScheduledRequest], decodes: list[ScheduledRequest]
    ) -> list[SampledToken | None]:
        chunks = [entry for entry in batch if entry.num_new > 1]
        token_ids_T, plan = mixed_plan(decodes, chunks, self._inputs)
        hidden_TH = self._forward(token_ids_T, plan)
        rows, sampling, end = [], [], 0
        for entry in (*decodes, *chunks):
            end += entry.num_new
            if entry.samples:
                rows.append(end - 1)
                sampling.append(entry.request)
        if not rows:
            return [None] * len(batch)
        logits_NV = self._model.logits(hidden_TH[upload(torch.tensor(rows), hidden_TH.device)])
        drawn = dict(zip(sampling, self._sample(logits_NV, sampling), strict=True))
        return [drawn.get(entry.request) for entry in batch]

    def _forward(self, token_ids_T: Tensor, plan: StepPlan) -> Tensor:
        return self._model.forward(token_ids_T, lambda layer, qkv: self._attention(layer, qkv, plan))

    def _sample(self, logits_NV: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        """What is wanted of float32 logits."""
        params = [request.sampling or GREEDY for request in requests]
        chosen = choices(
            (one, request.num_output_tokens) for one, request in zip(params, requests, strict=True)
        )
        tokens = self._draw(logits_NV, upload(torch.from_numpy(chosen), logits_NV.device)).tolist()
        logprobs = token_logprobs(logits_NV, params, tokens)
        return [SampledToken(token, logprobs.get(i)) for i, token in enumerate(tokens)]

    def _draw(self, logits_NV: Tensor, choices_N4: Tensor) -> Tensor:
        drawn_N = torch.empty(len(logits_NV), dtype=torch.int64, device=logits_NV.device)
        draw(logits_NV, choices_N4, drawn_N)
        return drawn_N


def _needs_logits(entry: ScheduledRequest) -> bool:
    """More than a token is asked for."""
    sampling = entry.request.sampling
    return sampling is not None and sampling.logprobs is not None
