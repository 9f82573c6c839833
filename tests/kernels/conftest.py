"""Pools with pages of known content, and every implementation of the kernels that this machine can run."""

import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from kvpilot.engine import kernels
from kvpilot.engine.kernels import PageTable, torch_ops
from kvpilot.engine.kernels.cpu import LIBRARIES, CPUKernels
from kvpilot.engine.kv.codecs.rotation import hadamard
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes
from kvpilot.engine.kv.torch_storage import TorchStorage

NOT_A_NUMBER = 0xFF  # as a byte of any float: reading what no one has written shows


class Pool(NamedTuple):
    """Sequences in a pool whose unwritten bytes are NaN; `k` and `v` are what the pages decode to."""

    storage: TorchStorage
    table: PageTable
    k_BLHSD: list[Tensor]  # float64
    v_BLHSD: list[Tensor]
    originals: list[tuple[Tensor, Tensor]]  # the values before encoding, float64

    def pages(self, sequence: int) -> list[SimpleNamespace]:
        begin, end = self.table.indptr[sequence : sequence + 2]
        return [
            SimpleNamespace(level=level, payload=payload, scales=scales)
            for level, payload, scales in self.table.cells[begin:end].tolist()
        ]


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: more threads only wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["torch", "v4", "v3", "any"])
def implementation(request: pytest.FixtureRequest):
    """`torch_ops`, or CPUKernels over one library."""
    if request.param == "torch":
        return torch_ops
    name = f"_cpu_{request.param}"
    if name not in LIBRARIES.get(torch.backends.cpu.get_cpu_capability(), ("_cpu_any",)):
        pytest.skip(f"this CPU does not run {name}")
    try:
        return CPUKernels(importlib.import_module(f"{kernels.__name__}.{name}"))
    except ImportError:
        pytest.skip(f"{name} was not built: pip install -e . with a C++ compiler")


@pytest.fixture
def make_pool() -> Callable[..., Pool]:
    return _make_pool


@pytest.fixture
def rope_reference() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return _rope_reference


def _rope_reference(qkv, positions, inverse_frequencies, num_heads, num_kv_heads, head_dim):
    """q, k and v in float64, after RoPE and in the cache's basis."""
    x = qkv.double().view(len(positions), -1, head_dim)
    angle = torch.tensor(positions, dtype=torch.float64)[:, None] * torch.tensor(inverse_frequencies)
    turn = torch.polar(torch.ones_like(angle), angle)[:, None]
    a, b = x[:, : num_heads + num_kv_heads].chunk(2, -1)
    turned = torch.complex(a, b) * turn
    x[:, : num_heads + num_kv_heads] = torch.cat((turned.real, turned.imag), -1)
    if (basis := hadamard(head_dim)) is not None:
        x[:, : num_heads + num_kv_heads] @= basis.double()
    return x.split((num_heads, num_kv_heads, num_kv_heads), dim=1)


def _make_pool(
    shape: PageShape,
    ladder: Sequence[str],
    num_tokens: Sequence[int],
    *,
    levels: Sequence[int] = (0,),
    seed: int = 0,
) -> Pool:
    """Full pages take `levels` in turn, the last page of a sequence is level 0. Cells lie in random order."""
    generator = torch.Generator().manual_seed(seed)
    page_size = shape.page_size
    page_levels, indptr = [], [0]
    for count in num_tokens:
        num_pages = -(-count // page_size)
        page_levels += [levels[i % len(levels)] for i in range(num_pages - 1)] + [0]
        indptr.append(indptr[-1] + num_pages)
    cells, pool_bytes = _place(shape, ladder, page_levels, generator)
    storage = TorchStorage(shape, ladder, pool_bytes)
    storage.pool.fill_(NOT_A_NUMBER)
    pool = Pool(
        storage,
        PageTable(cells=cells, indptr=np.array(indptr), num_tokens=np.array(num_tokens)),
        [],
        [],
        [],
    )
    for b, count in enumerate(num_tokens):
        size = (shape.num_layers, shape.num_kv_heads, count, shape.head_dim)
        k, v = (torch.randn(size, generator=generator) for _ in range(2))
        pool.originals.append((k.double(), v.double()))
        for i, (level, payload, scales) in enumerate(cells[indptr[b] : indptr[b + 1]].tolist()):
            tokens = slice(i * page_size, (i + 1) * page_size)
            _write(storage, (level, payload, scales), k[:, :, tokens], v[:, :, tokens])
        decoded = [storage.read_page(*cell) for cell in cells[indptr[b] : indptr[b + 1]].tolist()]
        pool.k_BLHSD.append(torch.cat([k for k, _ in decoded], dim=2)[:, :, :count].double())
        pool.v_BLHSD.append(torch.cat([v for _, v in decoded], dim=2)[:, :, :count].double())
    return pool


def _place(shape, ladder, page_levels, generator) -> tuple[np.ndarray, int]:
    cells = np.full((len(page_levels), 3), -1, dtype=np.int64)
    cells[:, 0] = page_levels
    offset = 0
    for i in torch.randperm(len(page_levels), generator=generator).tolist():
        codec = ladder[page_levels[i]]
        cells[i, 1] = offset
        offset += payload_bytes(codec, shape)
        if scale_bytes(codec, shape):
            cells[i, 2] = offset
            offset += scale_bytes(codec, shape)
    return cells, offset


def _write(storage: TorchStorage, cell: tuple[int, int, int], k: Tensor, v: Tensor) -> None:
    """A page that is not full keeps the NaNs behind its last token."""
    shape, count = storage.shape, k.shape[2]
    if count == shape.page_size:
        storage.write_page(*cell, k, v)
        return
    codec = storage.codecs[0]
    view = storage.pool[cell[1] : cell[1] + codec.payload_bytes].view(storage.dtype)
    view = view.view(shape.num_layers, 2, shape.num_kv_heads, shape.page_size, shape.head_dim)
    view[..., :count, :] = torch.stack((k, v), dim=1).to(storage.dtype)
