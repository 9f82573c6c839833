"""The GPU runner against the CPU's, Without a GPU: in Triton's interpreter."""

import pytest
import torch

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.factory import build_engine
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.model.checkpoint import tensor_shapes
from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.request import SamplingParams

pytest.importorskip("triton", reason="triton is not installed: the GPU kernels cannot run")

pytestmark = (
    pytest.mark.filterwarnings(  # the interpreter's; what lies behind an open page's tokens is masked later
        "ignore:Conversion of an array with ndim > 0", "ignore:invalid value encountered in matmul"
    )
)

CONFIG = ModelConfig(
    architecture="llama",
    hidden_size=128,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    vocab_size=96,
    max_position=512,
    tied_embeddings=True,
)
SHAPE = PageShape(num_layers=2, num_kv_heads=2, head_dim=64)
SLOT = SHAPE.num_values * 2


def llama(device, dtype, ops=None) -> Llama:
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=generator) * (0.2 if name == "embed" else shape[-1] ** -0.5)
        for name, shape in tensor_shapes(CONFIG).items()
    }
    return Llama(CONFIG, lambda name: weights[name].to(device), dtype, *([ops] if ops else []))


@pytest.fixture
def gpu_engine(device):
    from kvpilot.engine.kernels.gpu import elementwise
    from kvpilot.engine.kv.cuda_storage import CudaStorage
    from kvpilot.engine.runners.cuda_runner import CudaRunner

    def make(*, looks_ahead: bool = True, **changes: object) -> Engine:
        config = EngineConfig(
            pool_bytes=64 * SLOT, prefill_chunk=48, max_batch_ceiling=4, knobs=Knobs(max_batch=4)
        ).with_(**changes)
        model = llama(device, torch.bfloat16, elementwise)
        storage = CudaStorage(SHAPE, config.ladder, config.pool_bytes, CONFIG.num_heads, device, num_spares=2)
        runner = CudaRunner(
            model,
            storage,
            max_sequences=config.max_batch_ceiling,
            max_tokens=512,
            looks_ahead=looks_ahead,
        )
        return Engine(config, SHAPE, runner, storage, model_max_len=512)

    return make


def run(
    engine: Engine, lengths: list[int], max_tokens: int, only: int | None = None
) -> dict[str, list[int | None]]:
    generator = torch.Generator().manual_seed(1)
    texts: dict[str, list[int | None]] = {}
    for i, length in enumerate(lengths):
        prompt = torch.randint(CONFIG.vocab_size, (length,), generator=generator).tolist()
        if only in (None, i):
            sampling = SamplingParams(
                max_tokens=max_tokens + i, ignore_eos=True, temperature=i % 2, top_k=20, seed=i
            )
            engine.add_request(str(i), prompt, sampling)
    while engine.has_work():
        for output in engine.step():
            texts.setdefault(output.request.request_id, []).append(output.token)
        engine.check_integrity()
    return texts


@pytest.mark.usefixtures("loops")
def test_logprobs_match_those_of_the_cpu(gpu_engine):
    prompt = torch.randint(CONFIG.vocab_size, (71,), generator=torch.Generator().manual_seed(3)).tolist()
    results = []
    config = EngineConfig(pool_bytes=64 * SLOT, prefill_chunk=48)
    for engine in (build_engine(llama("cpu", torch.float32), config), gpu_engine()):
        engine.add_request("a", prompt, SamplingParams(max_tokens=3, logprobs=5, ignore_eos=True))
        outputs = []
        while engine.has_work():
            outputs += [output for output in engine.step() if output.token is not None]
            if len(outputs) == 1:
                tokens = engine.scheduler.running[0].tokens
                assert tokens is not None
                tokens[-1] = 17  # those drawn may differ
        results.append([dict(output.logprobs.top) for output in outputs[:2]])
    for expected, actual in zip(*results, strict=True):
        common = expected.keys() & actual.keys()
        assert len(common) >= 3
        assert (
            max(abs(expected[token] - actual[token]) for token in common) < 0.15
        )  # of logits around 8, in bf16


@pytest.mark.usefixtures("loops")
def test_looking_ahead_and_neighbours_change_no_token(gpu_engine, device):
    """Sequences that begin pages, end and join at different times, one of them sampled, in buckets larger than they
    are."""
    if device.type == "cuda":
        pytest.skip("matrix products of a GPU round by the number of rows, and other steps have other rows")
    lengths = [30, 3, 64]
    ahead, plain = (run(gpu_engine(looks_ahead=looks_ahead), lengths, 4) for looks_ahead in (True, False))
    assert ahead == plain
    assert run(gpu_engine(), lengths, 4, only=1)["1"] == ahead["1"]


@pytest.mark.usefixtures("loops")
def test_a_step_run_ahead_is_dropped_for_those_it_is_wrong_for(gpu_engine, device):
    """One sequence is aborted, another one's token is replaced, a third one joins: the last tokens are those of an
    engine that does not look ahead."""
    results = []
    for looks_ahead in (True, False):
        engine = gpu_engine(looks_ahead=looks_ahead)
        for name, length in (("a", 30), ("b", 31), ("c", 12)):
            engine.add_request(name, list(range(length)), SamplingParams(max_tokens=5, ignore_eos=True))
        texts = {}
        for step in range(9):
            for output in engine.step():
                texts.setdefault(output.request.request_id, []).append(output.token)
            engine.check_integrity()
            if step == 1:
                engine.abort("c")
                engine.scheduler.running[0].tokens[-1] = 5
            if step == 2:
                engine.add_request("d", list(range(20)), SamplingParams(max_tokens=3, ignore_eos=True))
        assert not engine.has_work()
        assert (engine._runner.num_ahead > 0) == looks_ahead
        results.append(texts)
    if device.type == "cpu":
        assert results[0] == results[1]
    lengths = [{name: len(text) for name, text in texts.items()} for texts in results]
    assert lengths[0] == lengths[1]
    assert lengths[0]["d"] == 3


def test_buckets_end_with_the_ceiling():
    from kvpilot.engine.runners.cuda_runner import batch_buckets

    assert batch_buckets(1) == [1]
    assert batch_buckets(33)[-2:] == [32, 33]
    assert batch_buckets(400)[-3:] == [320, 384, 400]


def test_the_most_likely_token_and_take_tokens(device):
    from kvpilot.engine.kernels.gpu.draw import draw
    from kvpilot.engine.kernels.gpu.elementwise import take_tokens

    x = torch.randn(3, 9001).bfloat16()
    x[1, 8999] = x[1, 17] = 100  # the first of equals
    x[2] = -torch.inf
    drawn = torch.zeros(5, dtype=torch.int64, device=device)
    draw(x.to(device), torch.zeros(3, 4, device=device), drawn[:3])
    assert drawn.tolist() == [x[0].argmax().item(), 17, 0, 0, 0]
    tokens, sources = torch.tensor([7, 8, 9], device=device), torch.tensor([1, -1, 0], device=device)
    assert take_tokens(tokens, sources, drawn).tolist() == [17, 8, drawn[0].item()]
