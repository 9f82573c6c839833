"""The engine on a GPU against the same weights in float32 on the CPU."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.factory import build_engine
from kvpilot.engine.kv.pool import PageState
from kvpilot.engine.model.checkpoint import tensor_shapes
from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.request import Request, SampledToken, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=512,
    intermediate_size=1408,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=2048,
    max_position=4096,
    rms_eps=1e-5,
    rope_theta=10000.0,
    tied_embeddings=True,
)


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * (0.05 if name == "embed" else 1.5 * shape[-1] ** -0.5)
        for name, shape in tensor_shapes(CONFIG).items()
    }


@pytest.fixture(scope="module")
def models(weights) -> dict[str, Llama]:
    from kvpilot.engine.kernels.gpu import elementwise

    def on_gpu(name: str) -> Tensor:
        return weights[name].cuda()

    return {
        "cpu": Llama(CONFIG, weights.__getitem__, torch.float32),
        "cpu_bf16": Llama(CONFIG, weights.__getitem__, torch.bfloat16),
        "cuda": Llama(CONFIG, on_gpu, torch.bfloat16, elementwise),
    }


def recording_engine(model: Llama, **changes: object) -> tuple[Engine, list[Tensor]]:
    """An engine, and the logits of every step whose requests ask for log-probabilities."""
    engine = build_engine(model, EngineConfig(pool_bytes=64 << 20, prefill_chunk=100).with_(**changes))
    recorded: list[Tensor] = []
    sample = engine._runner._sample  # type: ignore[attr-defined]

    def record(logits_NV: Tensor, requests: Sequence[Request]) -> list[SampledToken]:
        recorded.append(logits_NV.double().cpu())
        return sample(logits_NV, requests)

    engine._runner._sample = record  # type: ignore[attr-defined]
    return engine, recorded


def divergence(expected: Tensor, actual: Tensor) -> float:
    """Mean KL in nats."""
    p, q = expected.log_softmax(-1), actual.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).mean().item()


def prompt(num_tokens: int, seed: int) -> list[int]:
    return torch.randint(
        1, CONFIG.vocab_size, (num_tokens,), generator=torch.Generator().manual_seed(seed)
    ).tolist()


def next_logits(model: Llama, ladder: tuple[str, ...], levels: tuple[int, ...]) -> Tensor:
    """Logits of the first two tokens after a prompt whose sealed pages, before the second, take `levels` in turn."""
    engine, recorded = recording_engine(model, ladder=ladder)
    engine.add_request("a", prompt(270, 1), SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True))
    while not recorded:
        engine.step()
    request = engine.scheduler.running[0]
    assert request.tokens is not None
    for i, page in enumerate(request.pages[: 270 // 32]):
        for _ in range(levels[i % len(levels)]):
            del engine.cache._live_sealed[page.level][page]
            assert engine.pool.step_down(page)
            if page.level < page.max_level:
                engine.cache._live_sealed[page.level][page] = None
    # The tokens drawn may differ between devices
    request.tokens[-1] = 17
    engine.step()
    engine.check_integrity()
    return torch.cat(recorded)


@pytest.mark.parametrize(
    ("ladder", "levels"),
    [
        (("bf16", "int8", "int4"), (0,)),
        (("bf16", "int8", "int4"), (1,)),
        (("bf16", "fp8"), (1,)),
        (("bf16", "int8", "int4"), (0, 1, 2, 2)),
    ],
)
def test_logits_match_those_of_the_cpu_with_the_same_pages(models, ladder, levels):
    expected, rounded, actual = (
        next_logits(models[name], ladder, levels) for name in ("cpu", "cpu_bf16", "cuda")
    )
    for row in ([0], [1]):  # after a prefill in chunks, after a decode step
        # Random weights amplify what quantization does to rounding: as close as bf16 is on the CPU, or nearly
        assert divergence(expected[row], actual[row]) < 2 * divergence(expected[row], rounded[row]) + 5e-4


def test_a_full_pool_steps_pages_down_and_every_request_finishes(models):
    page_bytes = 4 * 2 * 2 * 32 * 64 * 2
    engine, _ = recording_engine(
        models["cuda"],
        pool_bytes=40 * page_bytes,
        knobs=Knobs(max_batch=8, kv_level=2),
    )
    lengths = [40 + 37 * i for i in range(12)]
    for i, length in enumerate(lengths):
        engine.add_request(str(i), prompt(length, i), SamplingParams(max_tokens=60, ignore_eos=True))
    finished, num_quantized = [], 0
    while engine.has_work():
        num_quantized = max(
            num_quantized, sum(engine.pool.num_pages(state, level) for state in PageState for level in (1, 2))
        )
        finished += [output for output in engine.step() if output.finish_reason is not None]
        engine.check_integrity()
    assert len(finished) == len(lengths)
    assert all(output.request.num_output_tokens == 60 for output in finished)
    assert num_quantized > 10


def test_knobs_and_levels_need_no_new_graph_and_padding_changes_nothing(models):
    """After the warm-up nothing is captured, whatever the batch, the levels and the knobs."""
    config = EngineConfig(
        pool_bytes=12 << 18, prefill_chunk=100, max_batch_ceiling=6, knobs=Knobs(max_batch=6)
    )
    engine = build_engine(models["cuda"], config)
    runner = engine._runner
    captured = runner.graphs.num_captured  # type: ignore[attr-defined]
    assert captured == len(runner.graphs)  # type: ignore[attr-defined]
    assert captured >= 3 * len((1, 2, 4, 6))
    for i in range(12):
        engine.add_request(str(i), prompt(50 + 41 * i, i), SamplingParams(max_tokens=90, ignore_eos=True))
    step, num_quantized = 0, 0
    while engine.has_work():
        if step % 7 == 0:
            engine.patch_knobs({"kv_level": step // 7 % 3, "max_batch": 1 + step // 7 % 6})
        engine.step()
        step += 1
        num_quantized += engine.pool.page_reads[1] + engine.pool.page_reads[2]
        engine.check_integrity()
    assert num_quantized > 0
    assert runner.graphs.num_captured == captured  # type: ignore[attr-defined]


def test_graphs_are_dropped_with_their_version_and_beyond_the_limit():
    from kvpilot.engine.runners.graph_cache import GraphCache

    x, y = torch.zeros(1, device="cuda"), torch.ones(1, device="cuda")
    cache = GraphCache(max_graphs=2)

    def run(key: int, version: int) -> float:
        def compute() -> None:
            torch.add(y, key, out=x)

        cache.get(key, version, compute).replay()
        return x.item()

    assert [run(key, 0) for key in (1, 2, 1, 3, 1, 2)] == [2, 3, 2, 4, 2, 3]
    assert cache.num_captured == 4  # 2 was dropped for 3
    assert run(1, 1) == 2
    assert (len(cache), cache.num_captured) == (1, 5)
