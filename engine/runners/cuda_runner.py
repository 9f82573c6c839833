"""The runner for NVIDIA GPUs: decode steps are CUDA graphs, steps with prompts run op by op.

Shape suffixes: B sequences of a decode step, T tokens of a step, N rows that need logits, H hidden, V vocabulary.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvpilot.engine.attention import rope_tables
from kvpilot.engine.cuda_attention import CudaAttention, StepPlan
from kvpilot.engine.kernels.gpu.decode import Scratch
from kvpilot.engine.kv.cuda_storage import CudaStorage
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.request import Request, SampledToken, SamplingParams, ScheduledRequest
from kvpilot.engine.runners.graph_cache import GraphCache
from kvpilot.engine.runners.step_plan import DecodeInputs, mixed_plan
from kvpilot.engine.sampling import sample

BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)
BUCKET_STEP = 64  # beyond the last one
GREEDY = SamplingParams()


def batch_buckets(ceiling: int) -> list[int]:
    """Sizes that decode steps are padded to: the last one is the ceiling."""
    sizes = [*BUCKETS, *range(BUCKETS[-1] + BUCKET_STEP, ceiling, BUCKET_STEP)]
    return [*(size for size in sizes if size < ceiling), ceiling]


class CudaRunner:
    """One graph per bucket of batch sizes and lowest precision present; everything else that may change between
    steps (pages, levels, lengths) is read from buffers at fixed addresses, so that no knob needs a new graph."""

    def __init__(self, model: Llama, storage: CudaStorage, *, max_sequences: int, max_tokens: int) -> None:
        """`max_tokens` is the longest sequence."""
        config, device = model.config, storage.device
        self._model = model
        self._storage = storage
        self._inputs = DecodeInputs(storage, max_sequences, max_tokens)
        num_items = self._inputs.max_items
        scratch = Scratch.make(num_items, config.num_heads, config.head_dim, device)
        rope = rope_tables(config.rope_inverse_frequencies, max_tokens)
        self._attention = CudaAttention(config.num_heads, storage, rope, scratch)
        self._buckets = batch_buckets(max_sequences)
        self._logits_BV = torch.empty((max_sequences, config.vocab_size), device=device)
        self._drawn_B = torch.zeros(max_sequences, dtype=torch.int64, device=device)
        self.graphs = GraphCache() if device.type == "cuda" else None

    @torch.inference_mode()
    def warm_up(self, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
        """Captures every graph, so that no step has to: `progress(done, total)`."""
        self._inputs.clear()
        keys = [(size, v) for size in reversed(self._buckets) for v in range(self._inputs.num_variants)]
        for done, (size, variant) in enumerate(keys, 1):
            self._run_decode(size, variant, replays=False)
            progress(done, len(keys))

    @torch.inference_mode()
    def execute(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        decodes = [entry for entry in batch if entry.num_new == 1]
        if len(decodes) < len(batch):
            return self._execute_mixed(batch, decodes)
        rows = self._inputs.tables.rows(decodes)
        size = next(size for size in self._buckets if size >= len(decodes))
        variant = self._inputs.set(decodes, rows, size)
        self._storage.flush()
        self._run_decode(size, variant)
        return self._draw(batch)

    # ------------------------------------------------------------------ decode
    def _run_decode(self, size: int, variant: int, *, replays: bool = True) -> None:
        def compute() -> None:
            self._decode(size, variant)

        if self.graphs is None:
            compute()
            return
        version = (self._storage.pool.data_ptr(), id(self._model))
        graph = self.graphs.get((size, variant), version, compute)
        if replays:
            graph.replay()

    def _decode(self, size: int, variant: int) -> None:
        """Logits and most likely tokens of the buffers' first `size` sequences."""
        inputs = self._inputs
        plan = StepPlan(
            positions_T=inputs.positions[:size],
            places_T2=inputs.places[:size],
            num_decodes=size,
            table=inputs.table(size, variant),
            chunks=None,
        )
        logits_BV = self._model.logits(self._forward(inputs.tokens[:size], plan))
        self._logits_BV[:size] = logits_BV
        torch.argmax(logits_BV, dim=-1, out=self._drawn_B[:size])

    def _draw(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        params = [_sampling(entry.request) for entry in batch]
        if all(p.temperature == 0 and p.logprobs is None for p in params):
            tokens = self._drawn_B[: len(batch)].tolist()
            return [
                SampledToken(token) if entry.samples else None
                for token, entry in zip(tokens, batch, strict=True)
            ]
        drawn = self._sample(self._logits_BV[: len(batch)], [entry.request for entry in batch])
        return [token if entry.samples else None for token, entry in zip(drawn, batch, strict=True)]

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
        logits_NV = self._model.logits(hidden_TH[torch.tensor(rows, device=hidden_TH.device)])
        drawn = dict(zip(sampling, self._sample(logits_NV, sampling), strict=True))
        return [drawn.get(entry.request) for entry in batch]

    def _forward(self, token_ids_T: Tensor, plan: StepPlan) -> Tensor:
        return self._model.forward(token_ids_T, lambda layer, qkv: self._attention(layer, qkv, plan))

    def _sample(self, logits_NV: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        steps = [request.num_output_tokens for request in requests]
        return sample(logits_NV, [_sampling(request) for request in requests], steps)


def _sampling(request: Request) -> SamplingParams:
    return request.sampling or GREEDY
