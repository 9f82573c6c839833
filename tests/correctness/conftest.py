"""Runs the whole engine on given continuations and keeps the distribution behind every token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kvpilot.engine.attention import PagedAttention, rope_tables
from kvpilot.engine.config import EngineConfig
from kvpilot.engine.engine import Engine
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.torch_storage import TorchStorage
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.model.load import load_model
from kvpilot.engine.request import SampledToken, SamplingParams, ScheduledRequest
from kvpilot.engine.runners.torch_runner import TorchRunner


@dataclass(frozen=True, kw_only=True)
class Golden:
    """What transformers says in float32 (make_golden.py): N tokens, and the K most likely behind each."""

    name: str
    prompt: list[int]
    tokens: list[int]
    top_ids_NK: Tensor
    top_logprobs_NK: Tensor


class RecordingModel:
    """The model, keeping the logits that it gave last."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama
        self.last_logits_NV = torch.empty(0, 0)

    def forward(self, token_ids_T: Tensor, attend: Callable[[int, Tensor], Tensor]) -> Tensor:
        return self._llama.forward(token_ids_T, attend)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        self.last_logits_NV = self._llama.logits(hidden_NH).clone()
        return self.last_logits_NV


class ForcingRunner:
    """A TorchRunner whose samples are replaced by given tokens, where there are any."""

    def __init__(self, model: RecordingModel, attention: PagedAttention) -> None:
        self._model = model
        self._runner = TorchRunner(model, attention)
        self.forced: dict[str, list[int]] = {}
        self.logits: dict[str, list[Tensor]] = {}

    def execute(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        sampled = self._runner.execute(batch)
        rows = iter(self._model.last_logits_NV)
        for i, entry in enumerate(batch):
            if not entry.samples:
                continue
            request_id = entry.request.request_id
            self.logits.setdefault(request_id, []).append(next(rows))
            if request_id in self.forced:
                sampled[i] = SampledToken(self.forced[request_id][entry.request.num_output_tokens])
        return sampled


class Harness:
    """One engine in its own pool, in the dtype of `llama`."""

    def __init__(self, llama: Llama, **envelope: object) -> None:
        level0 = "fp32" if llama.dtype == torch.float32 else "bf16"
        envelope = {
            "pool_bytes": 192 << 20,
            "prefill_chunk": 4096,
            "ladder": (level0, "int8", "int4"),
        } | envelope
        config = EngineConfig().with_(**envelope)
        shape = PageShape(
            num_layers=llama.config.num_layers,
            num_kv_heads=llama.config.num_kv_heads,
            head_dim=llama.config.head_dim,
            page_size=config.page_size,
        )
        storage = TorchStorage(shape, config.ladder, config.pool_bytes)
        rope = rope_tables(llama.config.rope_inverse_frequencies, 2048)
        attention = PagedAttention(shape, llama.config.num_heads, storage, rope)
        self.runner = ForcingRunner(RecordingModel(llama), attention)
        self.engine = Engine(config, shape, self.runner, storage, model_max_len=2048)
        self._count = 0

    def generate(
        self,
        prompts: list[list[int]],
        num_tokens: int,
        forced: list[list[int]] | None = None,
        max_kv_levels: Sequence[int | None] | None = None,
    ) -> tuple[list[list[int]], Tensor, list[int]]:
        """Runs the prompts together: output tokens, the logits behind them [B, N, V], cached prompt tokens."""
        requests = []
        for i, prompt in enumerate(prompts):
            request_id = f"request-{self._count}"
            self._count += 1
            if forced is not None:
                self.runner.forced[request_id] = forced[i]
            sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
            requests.append(
                self.engine.add_request(
                    request_id, prompt, sampling, max_kv_level=max_kv_levels[i] if max_kv_levels else None
                )
            )
        while self.engine.has_work():
            self.engine.step()
        self.engine.check_integrity()
        logits = [torch.stack(self.runner.logits.pop(request.request_id)) for request in requests]
        outputs = [
            (request.tokens or [])[len(prompt) :] for request, prompt in zip(requests, prompts, strict=True)
        ]
        return outputs, torch.stack(logits), [request.num_cached for request in requests]


@pytest.fixture(scope="session")
def goldens() -> list[Golden]:
    data = np.load(Path(__file__).parent / "golden.npz")
    names = [key.removesuffix(".prompt") for key in data.files if key.endswith(".prompt")]
    return [
        Golden(
            name=name,
            prompt=data[f"{name}.prompt"].tolist(),
            tokens=data[f"{name}.tokens"].tolist(),
            top_ids_NK=torch.from_numpy(data[f"{name}.top_ids"].astype(np.int64)),
            top_logprobs_NK=torch.from_numpy(data[f"{name}.top_logprobs"]),
        )
        for name in names
    ]


@pytest.fixture(scope="session", params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def llama(request: pytest.FixtureRequest) -> Llama:
    return load_model("smollm2", request.param).llama


@pytest.fixture
def harness(llama: Llama) -> Callable[..., Harness]:
    """`harness(**envelope)` makes an engine on the embedded model."""
    return lambda **envelope: Harness(llama, **envelope)


@pytest.fixture(scope="session")
def baseline(llama: Llama, goldens: list[Golden]) -> Tensor:
    """Logits [prompts, tokens, V] along the golden continuations: one request at a time, each prompt in one chunk,
    nothing cached."""
    rows = []
    for golden in goldens:
        _, logits, cached = Harness(llama).generate([golden.prompt], len(golden.tokens), [golden.tokens])
        assert cached == [0]
        rows.append(logits[0])
    return torch.stack(rows)


def _mean_kl(logits_p: Tensor, logits_q: Tensor) -> float:
    """Mean KL(p || q) in nats over all distributions in the last dimension."""
    p, q = logits_p.double().log_softmax(-1), logits_q.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


@pytest.fixture
def mean_kl() -> Callable[[Tensor, Tensor], float]:
    return _mean_kl


@pytest.fixture
def same_output_limit(llama: Llama) -> float:
    """Largest mean KL between two ways to compute the same thing."""
    return 1e-5 if llama.dtype == torch.float32 else 2e-3
