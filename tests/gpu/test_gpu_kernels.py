"""The Triton kernels against float64 and against the CPU codecs."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvpilot.engine.kernels import torch_ops
from kvpilot.engine.kv.codecs import make_codec
from kvpilot.engine.kv.codecs.rotation import hadamard
from kvpilot.engine.kv.formats import PageShape, payload_bytes

pytest.importorskip("triton", reason="triton is not installed: the GPU kernels cannot run")

pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0")  # the interpreter's
LADDER = ("bf16", "int8", "int4")


@pytest.fixture
def tolerance(device) -> float:
    """Of results in bf16. The interpreter cuts bits off where hardware rounds."""
    return 4e-3 if device.type == "cuda" else 1.2e-2


def one_item_each(table):
    """The same sequences, each of them one program per kv head."""
    spans = table.spans_B8.clone()
    spans[:, 5] = torch.arange(len(spans))
    spans[:, 6] = 1
    return replace(table, spans_B8=spans, items_I=spans[:, 5].clone(), merges=False)


def error(actual: Tensor, expected: Tensor) -> float:
    actual, expected = actual.double().cpu(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()


def reference(q_BHD: Tensor, pool, layer: int) -> Tensor:
    out = []
    for q_HD, k, v in zip(q_BHD.double().cpu(), pool.k_BLHSD, pool.v_BLHSD, strict=True):
        q_HGD = q_HD.view(pool.shape.num_kv_heads, -1, q_HD.shape[-1])
        weights = (q_HGD @ k[layer].mT / math.sqrt(q_HD.shape[-1])).softmax(-1)
        out.append((weights @ v[layer]).flatten(0, 1))
    return torch.stack(out)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("group", [1, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(
    ("ladder", "levels"),
    [
        (LADDER, (0,)),
        (LADDER, (1,)),
        (("bf16", "fp8"), (1,)),
        (LADDER, (2,)),
        (LADDER, (2, 0, 1, 2, 2)),
        (("bf16", "fp8", "int4"), (1, 2)),
    ],
)
def test_decode_attention(make_pool, device, tolerance, group, head_dim, ladder, levels):
    if device.type == "cpu" and (group, head_dim) not in ((3, 64), (4, 128)):
        pytest.skip("one group size per head_dim is enough for the interpreter")
    from kvpilot.engine.kernels.gpu.decode import decode_attention, decode_table

    shape = PageShape(num_layers=2, num_kv_heads=2, head_dim=head_dim)
    pool = make_pool(shape, ladder, [5, 96, 32 * 17 + 9], levels)
    table = decode_table(pool.table, ladder, shape, device)
    q = torch.randn(3, 2 * group, head_dim).bfloat16()
    out = decode_attention(q.to(device), pool.pool, shape, 1, table)
    assert table.merges
    assert error(out, reference(q, pool, 1)) < tolerance


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("levels", [(0,), (1,), (2,)])
def test_errors_do_not_grow_with_the_context(make_pool, device, tolerance, levels):
    from kvpilot.engine.kernels.gpu.decode import decode_attention, decode_table

    shape = PageShape(num_layers=1, num_kv_heads=1, head_dim=64)
    pool = make_pool(shape, LADDER, [16384], levels)
    table = one_item_each(decode_table(pool.table, LADDER, shape, device))
    q = torch.randn(1, 4, 64).bfloat16()
    out = decode_attention(q.to(device), pool.pool, shape, 0, table)
    assert error(out, reference(q, pool, 0)) < tolerance


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize("levels", [(0,), (1,), (2,), (0, 1, 2)])
def test_decode_attention_over_pages_of_64_and_one_split(make_pool, device, tolerance, levels):
    from kvpilot.engine.kernels.gpu.decode import decode_attention, decode_table

    shape = PageShape(num_layers=1, num_kv_heads=1, head_dim=64, page_size=64)
    pool = make_pool(shape, LADDER, [64 * 3 + 1], levels)
    table = one_item_each(decode_table(pool.table, LADDER, shape, device))
    q = torch.randn(1, 4, 64).bfloat16()
    out = decode_attention(q.to(device), pool.pool, shape, 0, table)
    assert error(out, reference(q, pool, 0)) < tolerance


@pytest.mark.parametrize(("head_dim", "page_size"), [(64, 32), (128, 32), (64, 64)])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("bf16", "int8"),
        ("bf16", "fp8"),
        ("bf16", "int4"),
        ("int8", "int4"),
        ("fp8", "int4"),
    ],
)
def test_conversions_write_what_the_cpu_codecs_write(
    make_pool, read_cell, device, source, target, head_dim, page_size
):
    from kvpilot.engine.kernels.gpu.convert import convert_pages

    if device.type == "cpu" and target == "fp8":
        pytest.skip("the interpreter does not round to fp8")
    shape = PageShape(num_layers=2, num_kv_heads=2, head_dim=head_dim, page_size=page_size)
    ladder = ("bf16",) if source == "bf16" else ("bf16", source)
    made = make_pool(shape, ladder, [2 * page_size], [len(ladder) - 1])
    codec = make_codec(target, shape)
    page_bytes = -(-(codec.payload_bytes + codec.scale_bytes) // 64) * 64
    room = torch.zeros(2 * page_bytes, dtype=torch.uint8, device=device)
    pool = torch.cat((made.pool, room))
    jobs, places = [], []
    for i, (_, payload, scales) in enumerate(made.table.cells.tolist()):
        place = len(made.pool) + i * page_bytes
        places.append((place, place + codec.payload_bytes))
        jobs.append((payload, scales, *places[-1]))
    convert_pages(pool, shape, source, target, torch.tensor(jobs, device=device))
    for i, place in enumerate(places):
        tokens = slice(i * page_size, (i + 1) * page_size)
        k, v = made.k_BLHSD[0][:, :, tokens].float(), made.v_BLHSD[0][:, :, tokens].float()
        codes = torch.zeros(codec.payload_bytes, dtype=torch.uint8)
        scales = torch.zeros(codec.scale_bytes, dtype=torch.uint8)
        codec.encode(k, v, codes, scales)
        actual_codes, actual_scales = read_cell(pool, shape, target, *place)
        # The order of float operations differs: a value near the middle of two codes may fall on either
        assert (actual_scales != scales).float().mean() < 0.01
        assert (actual_codes != codes).float().mean() < 0.01
        actual, expected = codec.decode(actual_codes, actual_scales), codec.decode(codes, scales)
        for a, b, exact in zip(actual, expected, (k, v), strict=True):
            assert error(a, exact) < 1.001 * error(b, exact)


@pytest.mark.filterwarnings(  # of the interpreter
    "ignore:invalid value", "ignore:All-NaN slice", "ignore:overflow encountered"
)
@pytest.mark.parametrize("target", ["int8", "int4"])
def test_a_converted_page_keeps_its_nan(make_pool, read_cell, device, target):
    from kvpilot.engine.kernels.gpu.convert import convert_pages

    shape = PageShape(num_layers=1, num_kv_heads=2, head_dim=64)
    made = make_pool(shape, ("bf16",), [32], [0])
    pool = torch.cat((made.pool, torch.zeros(1 << 16, dtype=torch.uint8, device=device)))
    head_values = 32 * 64
    values = pool[: len(made.pool)].view(torch.bfloat16)
    values[5 * 64 + 3] = torch.nan  # K of head 0, token 5
    values[3 * head_values + 7 * 64] = torch.inf  # V of head 1, token 7
    codec = make_codec(target, shape)
    place = (len(made.pool), len(made.pool) + codec.payload_bytes)
    convert_pages(pool, shape, "bf16", target, torch.tensor([(0, -1, *place)], device=device))
    k, v = codec.decode(*read_cell(pool, shape, target, *place))
    assert not k[0, 0, 5].isfinite().any()
    assert k[0, 1].isfinite().all()
    assert not v[0, 1, 7].isfinite().any()
    assert v[0, 0].isfinite().all()


@pytest.mark.parametrize("ladder", [LADDER, ("bf16", "fp8", "int4")])
def test_gather_pages(make_pool, device, tolerance, ladder):
    from kvpilot.engine.kernels.gpu.convert import gather_pages

    shape = PageShape(num_layers=2, num_kv_heads=2, head_dim=64)
    pool = make_pool(shape, ladder, [32 * 5 + 7], [0, 1, 2])
    pages = [(*cell, 32 * i, 32 if i < 5 else 3) for i, cell in enumerate(pool.table.cells.tolist())]
    k, v = gather_pages(
        pool.pool, shape, ladder, 1, torch.tensor(pages, device=device), num_tokens := 32 * 5 + 3
    )
    for actual, expected in ((k, pool.k_BLHSD[0]), (v, pool.v_BLHSD[0])):
        assert error(actual, expected[1, :, :num_tokens].transpose(0, 1)) < tolerance


@pytest.mark.parametrize(("head_dim", "num_more"), [(64, 0), (128, 0), (64, 147)])
def test_rope_rotate_write(device, tolerance, head_dim, num_more):
    from kvpilot.engine.kernels.gpu.elementwise import basis_signs, rope_rotate_write

    shape = PageShape(num_layers=2, num_kv_heads=1, head_dim=head_dim)
    page_bytes = payload_bytes("bf16", shape)
    pool = torch.zeros(2 * page_bytes, dtype=torch.uint8, device=device)
    positions, num_heads = [3, 40, 7, *(i % 64 for i in range(num_more))], 2
    places = [(page_bytes, 3), (0, 8), (0, 7), *[(-1, 0)] * num_more]  # the last ones are not written
    angles = torch.arange(64, dtype=torch.float64)[:, None] * torch.rand(head_dim // 2).double()
    rope = torch_ops.RopeTables(angles.cos().float(), angles.sin().float())
    qkv = torch.randn(len(positions), 4 * head_dim).bfloat16()
    q = rope_rotate_write(
        qkv.to(device),
        torch.tensor(positions, device=device),
        torch.tensor(places, device=device),
        torch_ops.RopeTables(rope.cos.to(device), rope.sin.to(device)),
        basis_signs(head_dim, device),
        pool,
        shape,
        1,
        num_heads,
    )
    x = qkv.double().view(-1, 4, head_dim)
    a, b = x[:, :3].chunk(2, -1)
    cos, sin = (table.double()[positions][:, None] for table in rope)
    basis = hadamard(head_dim)
    assert basis is not None
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), -1) @ basis.double()
    assert error(q, turned[:, :2]) < tolerance
    pages = pool.view(torch.bfloat16).view(2, 2, 2, 1, 32, head_dim)
    for i, (payload, slot) in enumerate(places[:3]):
        written = pages[payload // page_bytes, 1, :, 0, slot]
        assert error(written[0], turned[i, 2]) < tolerance
        assert torch.equal(written[1].cpu(), qkv.view(-1, 4, head_dim)[i, 3])
    assert pages.count_nonzero().item() <= 3 * 2 * head_dim


def test_norms_and_activation(device, tolerance):
    from kvpilot.engine.kernels.gpu import elementwise

    x, residual, weight = torch.randn(5, 96).bfloat16(), torch.randn(5, 96), torch.randn(96).bfloat16()
    expected_residual = residual.clone()
    expected = torch_ops.add_rms_norm(x, expected_residual, weight, 1e-5)
    residual = residual.to(device)
    actual = elementwise.add_rms_norm(x.to(device), residual, weight.to(device), 1e-5)
    assert error(residual, expected_residual) < 1e-6
    assert error(actual, expected) < tolerance
    expected = torch_ops.rms_norm(expected_residual, weight, 1e-5)
    assert error(elementwise.rms_norm(residual, weight.to(device), 1e-5), expected) < tolerance
    gate_up = torch.randn(3, 2 * 70).bfloat16()
    assert error(elementwise.silu_mul(gate_up.to(device)), torch_ops.silu_mul(gate_up)) < tolerance


def test_gemv(device, tolerance):
    from kvpilot.engine.kernels.gpu.gemv import can_gemv, gemv

    x, weight = torch.randn(1, 4096).bfloat16(), torch.randn(6, 4096).bfloat16()
    assert can_gemv(x, weight)
    assert not can_gemv(x[:, :4000], weight[:, :4000])
    assert error(gemv(x.to(device), weight.to(device)), x.double() @ weight.double().T) < tolerance
