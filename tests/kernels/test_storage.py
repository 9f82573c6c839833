"""Conversions and moves of pages."""

import pytest
import torch

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kernels import torch_ops
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes
from kvpilot.engine.kv.storage import Cell, Conversion, Move
from kvpilot.engine.kv.torch_storage import TorchStorage

CODECS = ("fp32", "bf16", "int8", "fp8", "int4")
SHAPE = PageShape(num_layers=2, num_kv_heads=3, head_dim=64, page_size=32)


def random_page(seed: int, shape: PageShape = SHAPE):
    generator = torch.Generator().manual_seed(seed)
    size = (shape.num_layers, shape.num_kv_heads, shape.page_size, shape.head_dim)
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


@pytest.mark.parametrize("head_dim", [24, 64, 80])
@pytest.mark.parametrize(
    ("source", "target"), [(a, b) for i, a in enumerate(CODECS) for b in CODECS[i + 1 :]]
)
def test_native_conversion_equals_the_codecs(implementation, source, target, head_dim):
    shape = PageShape(num_layers=2, num_kv_heads=3, head_dim=head_dim, page_size=16)
    levels = {"fp32": 0, source: 1, target: 2} if source != "fp32" else {"fp32": 0, target: 1}
    storage = TorchStorage(shape, tuple(levels), 1 << 20)
    here, there, reference = Cell(1 << 18, 3 << 17), Cell(1 << 19, 5 << 17), Cell(3 << 18, 7 << 17)
    storage.write_page(levels[source], *here, *random_page(0, shape))
    implementation.convert_page(storage, Conversion(here, levels[source], there, levels[target]))
    torch_ops.convert_page(storage, Conversion(here, levels[source], reference, levels[target]))
    for size, ours, theirs in (
        (payload_bytes(target, shape), there.payload, reference.payload),
        (scale_bytes(target, shape), there.scales, reference.scales),
    ):
        different = storage.pool[ours : ours + size] != storage.pool[theirs : theirs + size]
        assert different.sum() <= 0.002 * size  # ties that fell the other way
    step = {"bf16": 0, "int8": 0.04, "fp8": 0.3, "int4": 0.7}[target]
    for ours, theirs in zip(
        storage.read_page(levels[target], *there), storage.read_page(levels[target], *reference), strict=True
    ):
        assert (ours - theirs).abs().max() <= step


def test_a_target_may_be_the_source_of_a_later_conversion():
    storage = TorchStorage(SHAPE, ("fp32", "int8", "int4"), 1 << 20)
    k, v = random_page(1)
    first, second, third = Cell(0, -1), Cell(1 << 18, 3 << 17), Cell(1 << 19, 5 << 17)
    storage.write_page(0, *first, k, v)
    storage.convert([Conversion(first, 0, second, 1), Conversion(second, 1, third, 2)])
    in_one_call = storage.read_page(2, *third)
    storage.convert([Conversion(first, 0, second, 1)])
    storage.convert([Conversion(second, 1, third, 2)])
    for a, b in zip(in_one_call, storage.read_page(2, *third), strict=True):
        assert torch.equal(a, b)


def test_a_source_may_be_overwritten_by_a_later_conversion():
    storage = TorchStorage(SHAPE, ("fp32", "int8"), 1 << 20)
    one, two = random_page(2), random_page(3)
    a, b, c = Cell(0, -1), Cell(1 << 18, -1), Cell(1 << 19, 5 << 17)
    storage.write_page(0, *a, *one)
    storage.write_page(0, *b, *two)
    into_a = Cell(0, 9 << 16)
    storage.convert([Conversion(a, 0, c, 1), Conversion(b, 0, into_a, 1)])
    for cell, original in ((c, one), (into_a, two)):
        for decoded, values in zip(storage.read_page(1, *cell), original, strict=True):
            assert (decoded - values).abs().max() <= 0.02 * values.abs().max()


def test_moves_happen_in_order():
    storage = TorchStorage(SHAPE, ("bf16",), 1 << 20)
    storage.pool[:300] = torch.arange(300) % 251
    expected = storage.pool[:100].clone()
    storage.move([Move(0, 100, 100), Move(100, 4000, 100), Move(200, 0, 100)])
    assert torch.equal(storage.pool[4000:4100], expected)
    assert torch.equal(storage.pool[100:200], expected)
    assert torch.equal(storage.pool[:100], storage.pool[200:300])


def test_sizes_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="pool_bytes=1000"):
        TorchStorage(SHAPE, ("bf16",), 1000)
    with pytest.raises(ConfigError, match="ladder"):
        TorchStorage(SHAPE, ("int8",), 1 << 20)


def test_capacity_gain_counts_every_byte():
    shape = PageShape(num_layers=30, num_kv_heads=3, head_dim=64, page_size=32)
    full = payload_bytes("bf16", shape)
    gains = {codec: full / (payload_bytes(codec, shape) + scale_bytes(codec, shape)) for codec in CODECS}
    assert gains["int8"] >= 1.9
    assert gains["int4"] >= 3.3
