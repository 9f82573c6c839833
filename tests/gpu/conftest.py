"""Pools in the GPU's page layout. Without a GPU the kernels run under Triton's interpreter, on tiny shapes."""

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kvpilot.engine.kernels import PageTable
from kvpilot.engine.kv.codecs import make_codec
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

from kvpilot.engine.kernels.gpu.layout import from_gpu, to_gpu


class GPUPool(NamedTuple):
    """Sequences in a pool of bytes; `k` and `v` are what their pages decode to, float64 [L, H, S, D]."""

    pool: Tensor
    table: PageTable
    ladder: tuple[str, ...]
    shape: PageShape
    k_BLHSD: list[Tensor]
    v_BLHSD: list[Tensor]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def loops(device):
    """Needs loops whose bounds are loaded from memory."""
    if device.type == "cpu" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("loops in the interpreter of triton 3.6 need numpy < 2.4")


@pytest.fixture
def make_pool(device) -> Callable[..., GPUPool]:
    def make(
        shape: PageShape,
        ladder: Sequence[str],
        num_tokens: Sequence[int],
        levels: Sequence[int],
        seed: int = 0,
    ) -> GPUPool:
        return _make_pool(shape, tuple(ladder), num_tokens, levels, seed, device)

    return make


@pytest.fixture
def read_cell() -> Callable[..., tuple[Tensor, Tensor]]:
    return _read_cell


def _make_pool(shape, ladder, num_tokens, levels, seed, device) -> GPUPool:
    """Full pages take `levels` in turn; a last page that is not full is exact, with NaN behind its tokens."""
    generator = torch.Generator().manual_seed(seed)
    page = shape.page_size
    page_levels, indptr = [], [0]
    for count in num_tokens:
        page_levels += [levels[i % len(levels)] for i in range(count // page)] + [0] * (count % page > 0)
        indptr.append(indptr[-1] + -(-count // page))
    cells, pool_bytes = _place(shape, ladder, page_levels, generator)
    pool = torch.full((pool_bytes,), 0xFF, dtype=torch.uint8)
    k_all, v_all = [], []
    for b, count in enumerate(num_tokens):
        size = (shape.num_layers, shape.num_kv_heads, (indptr[b + 1] - indptr[b]) * page, shape.head_dim)
        k, v = torch.randn(size, generator=generator), torch.randn(size, generator=generator)
        k += torch.randn((*size[:2], 1, size[3]), generator=generator)  # channels differ in mean
        k[:, :, count:] = v[:, :, count:] = torch.nan
        pairs = []
        for i, (level, payload, scales) in enumerate(cells[indptr[b] : indptr[b + 1]].tolist()):
            tokens = slice(i * page, (i + 1) * page)
            pairs.append(
                _write(pool, shape, ladder[level], payload, scales, k[:, :, tokens], v[:, :, tokens])
            )
        for whole, part in ((k_all, 0), (v_all, 1)):
            whole.append(torch.cat([pair[part] for pair in pairs], dim=2)[:, :, :count].double())
    table = PageTable(cells=cells, indptr=np.array(indptr), num_tokens=np.array(num_tokens))
    return GPUPool(pool.to(device), table, ladder, shape, k_all, v_all)


def _place(shape, ladder, page_levels, generator) -> tuple[np.ndarray, int]:
    """Cells in random order; those of scales lie between those of codes, aligned as the pool's slots are."""
    cells = np.full((len(page_levels), 3), -1, dtype=np.int64)
    cells[:, 0] = page_levels
    offset = 0
    for i in torch.randperm(len(page_levels), generator=generator).tolist():
        codec = ladder[page_levels[i]]
        cells[i, 1] = offset
        offset += payload_bytes(codec, shape)
        if scale_bytes(codec, shape):
            cells[i, 2] = offset + 4
            offset += -(-(scale_bytes(codec, shape) + 4) // 64) * 64
    return cells, offset


def _write(pool, shape, codec_name, payload, scales, k, v) -> tuple[Tensor, Tensor]:
    """Encodes a page as the CPU does, stores it in the GPU's layout; what it decodes to."""
    codec = make_codec(codec_name, shape)
    codes = torch.zeros(codec.payload_bytes, dtype=torch.uint8)
    parameters = torch.zeros(codec.scale_bytes, dtype=torch.uint8)
    if codec_name == "bf16":
        codes = torch.stack((k, v), dim=1).bfloat16().view(torch.uint8).reshape(-1)
    else:
        codec.encode(k, v, codes, parameters)
    decoded = codec.decode(codes, parameters)
    codes, parameters = to_gpu(codec_name, shape, codes, parameters)
    pool[payload : payload + len(codes)] = codes
    pool[max(scales, 0) : max(scales, 0) + len(parameters)] = parameters
    return decoded


def _read_cell(pool: Tensor, shape, codec_name, payload, scales) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a cell as the CPU codec would have written them."""
    codes = pool[payload : payload + payload_bytes(codec_name, shape)].cpu()
    parameters = pool[max(scales, 0) : max(scales, 0) + scale_bytes(codec_name, shape)].cpu()
    return from_gpu(codec_name, shape, codes, parameters)
