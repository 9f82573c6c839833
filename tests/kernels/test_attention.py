"""A step's attention: decodes and prefill chunks together, whatever the chunks are."""

from types import SimpleNamespace

import pytest
import torch

from kvpilot.engine.attention import PagedAttention, rope_tables
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes
from kvpilot.engine.kv.storage import Cell, Conversion
from kvpilot.engine.kv.torch_storage import TorchStorage
from kvpilot.engine.request import ScheduledRequest

HEAD_DIM, NUM_HEADS, NUM_KV_HEADS, PAGE_SIZE, LAYER = 64, 6, 2, 16, 1
SHAPE = PageShape(num_layers=2, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, page_size=PAGE_SIZE)
WIDTH = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
FREQUENCIES = [1e4 ** (-2 * i / HEAD_DIM) for i in range(HEAD_DIM // 2)]
LADDER_BYTES = payload_bytes("fp32", SHAPE)


class World:
    """Sequences with a page per 16 tokens in one storage."""

    def __init__(self, stored: str, num_pages: int) -> None:
        self.storage = TorchStorage(SHAPE, (stored, "int8", "int4"), num_pages * LADDER_BYTES)
        self.storage.pool.fill_(0xFF)
        self.attention = PagedAttention(SHAPE, NUM_HEADS, self.storage, rope_tables(FREQUENCIES, 512))
        self.free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(1)).tolist()

    def sequence(self, num_tokens: int):
        count = -(-num_tokens // PAGE_SIZE)
        places = [self.free.pop() * LADDER_BYTES for _ in range(count)]
        return SimpleNamespace(pages=[SimpleNamespace(level=0, payload=at, scales=-1) for at in places])

    def step(self, *work) -> list[torch.Tensor]:
        """`work` is (sequence, start, qkv rows); returns one output per entry."""
        batch = [ScheduledRequest(sequence, start, len(qkv), True) for sequence, start, qkv in work]
        plan = self.attention.plan(batch)
        rows = torch.cat([qkv for _, _, qkv in work])
        outs = [self.attention(layer, rows, plan) for layer in range(SHAPE.num_layers)]
        return list(outs[LAYER].split([len(qkv) for _, _, qkv in work]))

    def step_down(self, page, level: int) -> None:
        codec = ("", "int8", "int4")[level]
        target = Cell(self.free.pop() * LADDER_BYTES, 0)
        target = target._replace(scales=target.payload + payload_bytes(codec, SHAPE))
        assert payload_bytes(codec, SHAPE) + scale_bytes(codec, SHAPE) <= LADDER_BYTES
        self.storage.convert([Conversion(Cell(page.payload, page.scales), page.level, target, level)])
        page.level, page.payload, page.scales = level, *target

    def stored(self, sequence, num_tokens: int) -> list[torch.Tensor]:
        """K and V [H, S, D] of the layer, float64."""
        layers = [self.storage.read_layer(p.level, p.payload, p.scales, LAYER) for p in sequence.pages]
        return [torch.cat(heads, dim=1)[:, :num_tokens].double() for heads in zip(*layers, strict=True)]


@pytest.fixture
def expected(rope_reference):
    """Causal attention in float64 of rows `start` onwards over what is stored."""

    def compute(world: World, sequence, qkv, start: int = 0) -> torch.Tensor:
        positions = list(range(start, start + len(qkv)))
        q, _, _ = rope_reference(qkv, positions, FREQUENCIES, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM)
        k, v = (
            x.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 0)
            for x in world.stored(sequence, positions[-1] + 1)
        )
        scores = q.transpose(0, 1) @ k.mT / HEAD_DIM**0.5
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril(start)
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        return (weights @ v).transpose(0, 1).flatten(1)

    return compute


def rows(num_tokens: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_tokens, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    rtol, atol = (2**-7, 2e-2) if dtype == torch.bfloat16 else (1e-5, 1e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


CASES = [(torch.float32, "fp32"), (torch.float32, "bf16"), (torch.bfloat16, "bf16")]
CUTS = [[100], [37, 40, 23], [16, 16, 68], [99, 1], [1] * 5 + [95], [2] * 50]


@pytest.mark.parametrize(("dtype", "stored"), CASES)
@pytest.mark.parametrize("cuts", CUTS, ids=lambda cuts: "+".join(map(str, cuts[:6])))
def test_any_chunking_gives_causal_attention(expected, dtype, stored, cuts):
    world = World(stored, 10)
    sequence, qkv = world.sequence(100), rows(100, dtype)
    outputs, start = [], 0
    for size in cuts:
        outputs += world.step((sequence, start, qkv[start : start + size]))
        start += size
    assert_close(torch.cat(outputs), expected(world, sequence, qkv), dtype)


@pytest.mark.parametrize(("dtype", "stored"), CASES)
def test_decodes_and_chunks_share_a_step(expected, dtype, stored):
    world = World(stored, 40)
    lengths = [50, 17, 90, 33, 5]
    news = [1, 17, 30, 1, 2]  # decode, whole prompt, chunk from mid-page, decode on a fresh page, short chunk
    sequences = [world.sequence(n) for n in lengths]
    inputs = [rows(n, dtype, seed) for seed, n in enumerate(lengths)]
    for sequence, qkv, new in zip(sequences, inputs, news, strict=True):
        if len(qkv) > new:
            world.step((sequence, 0, qkv[:-new]))
    outputs = world.step(
        *[(s, len(qkv) - new, qkv[-new:]) for s, qkv, new in zip(sequences, inputs, news, strict=True)]
    )
    for sequence, qkv, new, out in zip(sequences, inputs, news, outputs, strict=True):
        assert_close(out, expected(world, sequence, qkv[-new:], len(qkv) - new), dtype)


@pytest.mark.parametrize(("dtype", "stored"), CASES)
@pytest.mark.parametrize("new", [1, 2, 40])
def test_past_pages_of_any_level_are_read(expected, dtype, stored, new):
    world = World(stored, 20)
    sequence, qkv = world.sequence(88 + new), rows(88 + new, dtype)
    world.step((sequence, 0, qkv[:88]))
    for page, level in zip(sequence.pages, (1, 2, 0, 2, 1), strict=False):
        if level:
            world.step_down(page, level)
    (out,) = world.step((sequence, 88, qkv[88:]))
    assert_close(out, expected(world, sequence, qkv[88:], 88), dtype)


def test_sequences_may_share_pages(expected):
    world = World("bf16", 20)
    first, prompt = world.sequence(64), rows(64, torch.float32)
    world.step((first, 0, prompt))
    second = world.sequence(20)
    second.pages = first.pages[:3] + second.pages
    tail = rows(20, torch.float32, seed=1)
    decode = rows(1, torch.float32, seed=2)
    first.pages += world.sequence(1).pages
    outputs = world.step((second, 48, tail), (first, 64, decode))
    assert_close(outputs[0], expected(world, second, tail, 48), torch.float32)
    assert_close(outputs[1], expected(world, first, decode, 64), torch.float32)
