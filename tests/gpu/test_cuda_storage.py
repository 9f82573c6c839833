"""The pool's bytes on a GPU: what the bookkeeping asks for, as if in order."""

import random

import pytest
import torch

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.codecs import make_codec
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes
from kvpilot.engine.kv.pool import KVPool
from kvpilot.engine.kv.storage import Cell, Conversion, Move

pytest.importorskip("triton", reason="triton is not installed: the GPU kernels cannot run")

SHAPE = PageShape(num_layers=1, num_kv_heads=1, head_dim=64)
SLOT = payload_bytes("bf16", SHAPE)


@pytest.fixture
def storage(device):
    from kvpilot.engine.kv.cuda_storage import CudaStorage

    return CudaStorage(SHAPE, ("bf16", "int8", "int4"), 8 * SLOT, 4, device)


def test_a_conversion_may_write_where_an_earlier_one_read(storage, device, read_cell):
    values = torch.randn(3, 1, 2, 1, 32, 64).bfloat16()
    storage.pool[: 3 * SLOT] = values.to(device).view(torch.uint8).flatten()
    size = scale_bytes("int8", SHAPE)
    # Page 0 moves out to slot 3, page 1 into slot 0 and page 2 into slot 1
    targets = [Cell(slot * SLOT, 7 * SLOT + i * size) for i, slot in enumerate((3, 0, 1))]
    storage.convert([Conversion(Cell(i * SLOT, -1), 0, target, 1) for i, target in enumerate(targets)])
    codec = make_codec("int8", SHAPE)
    for page, target in zip(values, targets, strict=True):
        k, v = codec.decode(*read_cell(storage.pool, SHAPE, "int8", *target))
        for decoded, original in ((k, page[:, 0]), (v, page[:, 1])):
            assert ((decoded - original.float()).norm() / original.float().norm()) < 0.02


def test_pages_follow_any_course_of_conversions_and_moves(storage, device, read_cell):
    """Bookkeeping by the real pool; every page decodes to nearly what was written, wherever it went."""
    pool = KVPool(shape=SHAPE, ladder=("bf16", "int8", "int4"), pool_bytes=8 * SLOT, storage=storage)
    rng, pages, values, reached = random.Random(0), [], {}, set()
    for _ in range(300):
        if pool.available_slots > 0 and rng.random() < 0.4:
            page = pool.allocate()
            value = torch.randn(1, 2, 1, 32, 64).bfloat16()
            storage.pool[page.payload : page.payload + SLOT] = value.to(device).view(torch.uint8).flatten()
            pool.seal(page, is_sink=False)
            values[page] = value
            pages.append(page)
        elif pages and rng.random() < 0.2:
            pool.free(pages.pop(rng.randrange(len(pages))))
        elif rng.random() < 0.3:
            pool.compact()
        elif lower := [page for page in pages if page.level < 2 and pool.has_cells(page.level + 1)]:
            page = rng.choice(lower)
            pool.step_down(page)
            reached.add(page.level)
    pool.check_integrity()
    assert pool.num_moved > 3
    assert reached == {1, 2}
    for page in pages:
        name = pool.ladder[page.level]
        k, v = make_codec(name, SHAPE).decode(
            *read_cell(storage.pool, SHAPE, name, page.payload, page.scales)
        )
        for decoded, original in ((k, values[page][:, 0]), (v, values[page][:, 1])):
            error = (decoded - original.float()).norm() / original.float().norm()
            assert error < (0, 0.02, 0.15)[page.level] + 1e-6, name


def test_moves_happen_in_order(storage, device):
    content = torch.randint(256, (2 * SLOT,), dtype=torch.uint8)
    storage.pool[: 2 * SLOT] = content.to(device)
    storage.move([Move(0, 4 * SLOT, SLOT), Move(SLOT, 0, SLOT)])
    assert torch.equal(storage.pool[4 * SLOT : 5 * SLOT].cpu(), content[:SLOT])
    assert torch.equal(storage.pool[:SLOT].cpu(), content[SLOT:])


@pytest.mark.parametrize(
    ("changes", "ladder", "num_heads", "message"),
    [
        ({"head_dim": 96}, ("bf16",), 4, "head_dim=96"),
        ({"page_size": 16}, ("bf16",), 4, "page_size=16"),
        ({}, ("fp32", "int8"), 4, "ladder="),
        ({}, ("bf16",), 16, "num_heads=16"),
    ],
)
def test_what_the_kernels_do_not_cover_is_refused(device, changes, ladder, num_heads, message):
    from kvpilot.engine.kv.cuda_storage import CudaStorage

    shape = PageShape(**({"num_layers": 1, "num_kv_heads": 1, "head_dim": 64, "page_size": 32} | changes))
    with pytest.raises(ConfigError, match=message):
        CudaStorage(shape, ladder, 1 << 24, num_heads, device)
