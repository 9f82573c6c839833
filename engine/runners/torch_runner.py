"""The runner for torch models, on a CPU or a GPU: one forward pass over all tokens of a step."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpilot.engine.request import Request, SampledToken, SamplingParams, ScheduledRequest
from kvpilot.engine.sampling import sample


class Model(Protocol):
    """What the runner needs of a model; see `kvpilot.engine.model.llama.Llama`."""

    def forward(self, token_ids_T: Tensor, attend: Callable[[int, Tensor], Tensor]) -> Tensor: ...

    def logits(self, hidden_NH: Tensor) -> Tensor: ...


class Attention(Protocol):
    """Attention over paged K and V; see `kvpilot.engine.attention.PagedAttention`."""

    def plan(self, batch: Sequence[ScheduledRequest]) -> Any: ...

    def __call__(self, layer: int, qkv_TX: Tensor, plan: Any, /) -> Tensor: ...


class TorchRunner:
    """Runs prefill chunks and decode tokens of a step together, then samples for those who need a token."""

    def __init__(self, model: Model, attention: Attention, device: torch.device | str = "cpu") -> None:
        self._model = model
        self._attention = attention
        self._device = device

    @torch.inference_mode()
    def execute(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        hidden_TH = self._forward(batch)
        rows = [end - 1 for end, entry in zip(_ends(batch), batch, strict=True) if entry.samples]
        if not rows:
            return [None] * len(batch)
        logits_NV = self._model.logits(hidden_TH[rows])
        drawn = iter(self._sample(logits_NV, [entry.request for entry in batch if entry.samples]))
        return [next(drawn) if entry.samples else None for entry in batch]

    def _forward(self, batch: list[ScheduledRequest]) -> Tensor:
        tokens: list[int] = []
        for request, start, num_new, _ in batch:
            assert request.tokens is not None
            tokens += request.tokens[start : start + num_new]
        plan = self._attention.plan(batch)
        return self._model.forward(
            torch.tensor(tokens, device=self._device), lambda layer, qkv: self._attention(layer, qkv, plan)
        )

    def _sample(self, logits_NV: Tensor, requests: list[Request]) -> list[SampledToken]:
        params = [request.sampling or SamplingParams() for request in requests]
        return sample(logits_NV, params, [request.num_output_tokens for request in requests])


def _ends(batch: list[ScheduledRequest]) -> list[int]:
    """Row after the last token of each request in the flat step."""
    ends, row = [], 0
    for entry in batch:
        row += entry.num_new
        ends.append(row)
    return ends
