"""Decode attention and gathering over pages of mixed precision, against float64 on what the pages hold."""

import math

import pytest
import torch

from kvpilot.engine.kernels import torch_ops
from kvpilot.engine.kv.codecs import CODECS, Codec
from kvpilot.engine.kv.formats import BITS, PageShape
from kvpilot.engine.kv.storage import Cell, Conversion

MIXED = ("bf16", "int8", "int4")


def attention(q_BHD, pool, layer):
    """Softmax attention in float64, one sequence at a time."""
    rows = []
    for q_HD, k, v in zip(q_BHD.double(), pool.k_BLHSD, pool.v_BLHSD, strict=True):
        q_HGD = q_HD.view(k.shape[1], -1, k.shape[-1])
        weights = torch.softmax(q_HGD @ k[layer].mT / math.sqrt(k.shape[-1]), -1)
        rows.append((weights @ v[layer]).flatten(0, 1))
    return torch.stack(rows)


def causal_attention(q_THD, pool, layer, start):
    """The same for a chunk of the only sequence of `pool`."""
    (k,), (v,) = pool.k_BLHSD, pool.v_BLHSD
    rows = []
    for t, q_HD in enumerate(q_THD.double()):
        q_HGD, seen = q_HD.view(k.shape[1], -1, k.shape[-1]), start + t + 1
        weights = torch.softmax(q_HGD @ k[layer, :, :seen].mT / math.sqrt(k.shape[-1]), -1)
        rows.append((weights @ v[layer, :, :seen]).flatten(0, 1))
    return torch.stack(rows)


def queries(pool, group, dtype, scale=1.0):
    shape = pool.storage.shape
    generator = torch.Generator().manual_seed(7)
    size = (len(pool.k_BLHSD), shape.num_kv_heads * group, shape.head_dim)
    return (torch.randn(size, generator=generator) * scale).to(dtype)


def assert_close(actual, expected, dtype):
    assert actual.dtype == dtype
    if dtype == torch.bfloat16:
        torch.testing.assert_close(actual.double(), expected, rtol=2**-8, atol=1e-4)
    else:
        torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decode_over_mixed_levels_and_ragged_lengths(implementation, make_pool, head_dim, group, dtype):
    shape = PageShape(num_layers=2, num_kv_heads=2, head_dim=head_dim, page_size=32)
    pool = make_pool(shape, MIXED, (1, 31, 32, 33, 200, 70), levels=(0, 2, 1))
    q = queries(pool, group, dtype)
    out = implementation.decode_attention(q, pool.storage, 1, pool.table)
    assert_close(out, attention(q, pool, 1), dtype)


@pytest.mark.parametrize(
    ("ladder", "levels"),
    [
        (("fp32",), (0,)),
        (("bf16",), (0,)),
        (("bf16", "int8"), (1,)),
        (("fp32", "fp8"), (1,)),
        (("bf16", "int4"), (1,)),
        (("fp32", "bf16", "fp8", "int4"), (3, 2, 1, 0)),
    ],
)
@pytest.mark.parametrize("page_size", [2, 16, 64])
def test_decode_at_every_codec_and_page_size(implementation, make_pool, ladder, levels, page_size):
    shape = PageShape(num_layers=2, num_kv_heads=3, head_dim=64, page_size=page_size)
    pool = make_pool(shape, ladder, (70, 5, 1), levels=levels)
    q = queries(pool, 3, torch.float32)
    out = implementation.decode_attention(q, pool.storage, 0, pool.table)
    assert_close(out, attention(q, pool, 0), torch.float32)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_long_sequence_is_cut_and_merged(implementation, make_pool, num_threads):
    shape = PageShape(num_layers=1, num_kv_heads=3, head_dim=64, page_size=16)
    pool = make_pool(shape, MIXED, (700, 3, 200), levels=(2, 2, 1, 0))
    q = queries(pool, 3, torch.float32, scale=3.0)
    torch.set_num_threads(num_threads)
    out = implementation.decode_attention(q, pool.storage, 0, pool.table)
    assert_close(out, attention(q, pool, 0), torch.float32)


def test_scores_far_beyond_the_range_of_exp(implementation, make_pool):
    shape = PageShape(num_layers=1, num_kv_heads=1, head_dim=64, page_size=16)
    pool = make_pool(shape, ("fp32",), (200,))
    q = queries(pool, 2, torch.float32, scale=1000.0)
    out = implementation.decode_attention(q, pool.storage, 0, pool.table)
    torch.testing.assert_close(out.double(), attention(q, pool, 0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("head_dim", "group", "page_size"), [(64, 3, 32), (64, 1, 16), (64, 7, 6), (80, 2, 32), (128, 4, 32)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("start", "num_new"), [(0, 2), (0, 64), (63, 2), (37, 91), (150, 33)])
def test_prefill_over_mixed_levels(
    implementation, make_pool, head_dim, group, page_size, dtype, start, num_new
):
    shape = PageShape(num_layers=2, num_kv_heads=2, head_dim=head_dim, page_size=page_size)
    pool = make_pool(shape, MIXED, (start + num_new,), levels=(0, 2, 1))
    q = torch.randn(num_new, 2 * group, head_dim, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = implementation.prefill_attention(q, pool.storage, 1, pool.table.cells, start)
    expected = causal_attention(q, pool, 1, start)
    assert out.dtype == dtype
    atol = 2e-2 if dtype == torch.bfloat16 else 1e-5  # bf16: K, V and probabilities are rounded
    torch.testing.assert_close(
        out.double(), expected, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=atol
    )


@pytest.mark.parametrize(("codec", "tolerance"), [("int8", 0.02), ("fp8", 0.06), ("int4", 0.2)])
def test_decode_is_close_to_attention_over_the_original_values(implementation, make_pool, codec, tolerance):
    shape = PageShape(num_layers=1, num_kv_heads=3, head_dim=64, page_size=32)
    pool = make_pool(shape, ("bf16", codec), (300, 40), levels=(1,))
    q = queries(pool, 3, torch.float32)
    out = implementation.decode_attention(q, pool.storage, 0, pool.table)
    original = pool._replace(k_BLHSD=[k for k, _ in pool.originals], v_BLHSD=[v for _, v in pool.originals])
    assert (out - attention(q, original, 0)).abs().max() <= tolerance


@pytest.mark.parametrize("where", ["k", "v"])
def test_nan_in_the_cache_is_not_hidden(implementation, make_pool, where):
    shape = PageShape(num_layers=1, num_kv_heads=1, head_dim=64, page_size=16)
    pool = make_pool(shape, ("fp32",), (40,))
    values = pool.storage.pool.view(torch.float32)
    payload = int(pool.table.cells[0, 1]) // 4
    values[payload + (5 if where == "k" else 16 * 64 + 5)] = torch.nan
    out = implementation.decode_attention(queries(pool, 1, torch.float32), pool.storage, 0, pool.table)
    assert out.isnan().any()


@pytest.mark.parametrize("head_dim", [24, 64, 80, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 32, 33, 150])
def test_gathered_pages_hold_what_was_stored(implementation, make_pool, head_dim, dtype, num_tokens):
    shape = PageShape(num_layers=2, num_kv_heads=3, head_dim=head_dim, page_size=32)
    pool = make_pool(shape, ("fp32", "bf16", "fp8", "int4"), (num_tokens,), levels=(3, 2, 1, 0))
    k, v = implementation.gather_pages(pool.storage, 1, pool.table.cells, num_tokens, dtype)
    for dense, expected in ((k, pool.k_BLHSD[0][1]), (v, pool.v_BLHSD[0][1])):
        assert dense.is_contiguous()
        assert_close(dense, expected, dtype)


def test_unsupported_shapes_take_the_torch_path(implementation, make_pool):
    shape = PageShape(num_layers=1, num_kv_heads=1, head_dim=64, page_size=512)
    pool = make_pool(shape, ("bf16", "int4"), (600,), levels=(1,))
    q = queries(pool, 20, torch.float32)
    out = implementation.decode_attention(q, pool.storage, 0, pool.table)
    assert torch.equal(out, torch_ops.decode_attention(q, pool.storage, 0, pool.table))


class SixteenthsCodec(Codec):
    """Somebody's own: multiples of 1/16, without scales."""

    name = "sixteenths"

    def encode(self, k_LHPD, v_LHPD, payload, scales):
        codes = torch.stack((k_LHPD, v_LHPD), dim=1).mul(16).round().clamp(-127, 127).to(torch.int8)
        self._rows(payload, self.shape.head_dim).copy_(codes.view(torch.uint8))

    def decode(self, payload, scales):
        k_LHPD, v_LHPD = (self._rows(payload, self.shape.head_dim).view(torch.int8).float() / 16).unbind(1)
        return k_LHPD, v_LHPD


def test_a_codec_that_native_code_does_not_know_is_read_by_torch(implementation, make_pool, monkeypatch):
    monkeypatch.setitem(BITS, SixteenthsCodec.name, 8)
    monkeypatch.setitem(CODECS, SixteenthsCodec.name, SixteenthsCodec)
    shape = PageShape(num_layers=2, num_kv_heads=2, head_dim=64, page_size=32)
    pool = make_pool(shape, ("bf16", "sixteenths"), (1, 200, 70), levels=(0, 1))
    q = queries(pool, 3, torch.float32)
    out = implementation.decode_attention(q, pool.storage, 1, pool.table)
    assert_close(out, attention(q, pool, 1), torch.float32)

    end = int(pool.table.indptr[2])
    k_HSD, v_HSD = implementation.gather_pages(pool.storage, 1, pool.table.cells[1:end], 200, torch.float32)
    assert torch.equal(k_HSD.double(), pool.k_BLHSD[1][1])
    assert torch.equal(v_HSD.double(), pool.v_BLHSD[1][1])

    source, target = pool.pages(1)[:2]  # bf16, sixteenths
    k, v = pool.storage.read_page(0, source.payload, source.scales)
    there = Cell(target.payload, target.scales)
    implementation.convert_page(pool.storage, Conversion(Cell(source.payload, source.scales), 0, there, 1))
    for converted, original in zip(pool.storage.read_page(1, *there), (k, v), strict=True):
        assert (converted - original).abs().max() <= 1 / 32
