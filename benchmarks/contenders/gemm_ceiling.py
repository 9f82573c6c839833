"""The ceiling: the model's GEMMs alone, in bf16, with the fastest GEMM we know here (packed by oneDNN).

No attention, norms, activations, sampling or scheduling. Random weights: their values do not change the time, and
each layer has its own, so that they come from memory as in the model.
"""

import time
from pathlib import Path

import torch
from torch import Tensor
from worker import Timing

from kvpilot.engine.model.load import read_checkpoint

PREFILL_ROWS = 512  # prompt tokens per pass


def packed(rows: int, columns: int) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(torch.randn(rows, columns).bfloat16(), 16)


def gemm(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


class Contender:
    def __init__(self, model_path: str, threads: int) -> None:
        torch.set_num_threads(threads)
        config = read_checkpoint(Path(model_path)).config
        self.hidden, self.heads_size = config.hidden_size, config.num_heads * config.head_dim
        self.inner = config.intermediate_size
        self.layers = [
            (
                packed(config.qkv_size, self.hidden),
                packed(self.hidden, self.heads_size),
                packed(2 * self.inner, self.hidden),
                packed(self.hidden, self.inner),
            )
            for _ in range(config.num_layers)
        ]
        self.head = packed(config.vocab_size, self.hidden)
        self.version = f"torch {torch.__version__}, oneDNN"

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], num_output_tokens: int) -> Timing:
        num_requests, num_prompt_tokens = len(prompts), sum(map(len, prompts))
        begin = time.perf_counter()
        for row in range(0, num_prompt_tokens, PREFILL_ROWS):
            self._layers(min(PREFILL_ROWS, num_prompt_tokens - row))
        gemm(torch.zeros(num_requests, self.hidden, dtype=torch.bfloat16), self.head)
        first = time.perf_counter()
        for _ in range(num_output_tokens - 1):
            gemm(self._layers(num_requests), self.head)
        end = time.perf_counter()
        return Timing(
            total_seconds=end - begin,
            decode_seconds=end - first,
            decode_tokens=num_requests * (num_output_tokens - 1),
        )

    def _layers(self, rows: int) -> Tensor:
        x = torch.zeros(rows, self.hidden, dtype=torch.bfloat16)
        attended = torch.zeros(rows, self.heads_size, dtype=torch.bfloat16)
        activated = torch.zeros(rows, self.inner, dtype=torch.bfloat16)
        for qkv, o, gate_up, down in self.layers:
            gemm(x, qkv)
            gemm(attended, o)
            gemm(x, gate_up)
            x = gemm(activated, down)
        return x
