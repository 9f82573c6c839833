"""The kernels in native code, with the signatures of `torch_ops`, to which they leave what they do not cover.

The libraries are built by setup.py from cpu.cpp, one per instruction set. They use torch's own OpenMP
threads, because torch is imported first.
"""

import importlib
import os
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kernels import torch_ops
from kvpilot.engine.kernels.page_table import PageTable
from kvpilot.engine.kernels.torch_ops import RopeTables, cache_basis
from kvpilot.engine.kv.codecs.base import NonFiniteError
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.storage import Conversion

if TYPE_CHECKING:
    from kvpilot.engine.kv.torch_storage import TorchStorage

MAX_HEAD_DIM = 256  # the limits of the buffers in attention.h
MAX_PAGE_SIZE = 256
MAX_QUERIES_PER_KV_HEAD = 16
LIBRARIES = {"AVX512": ("_cpu_v4", "_cpu_v3"), "AVX2": ("_cpu_v3",)}  # else: "_cpu_any"
FLOATS = {torch.float32: 0, torch.bfloat16: 1}
KINDS = {"fp32": 0, "bf16": 1, "int8": 2, "fp8": 3, "int4": 4}  # `Kind` in formats.h
MAX_LEVELS = 8  # `Layout.kinds`


def load_library() -> ModuleType | None:
    """The library for this CPU; None if none was built or `KVPILOT_KERNELS=torch`."""
    wanted = os.environ.get("KVPILOT_KERNELS", "")
    if wanted not in ("", "torch"):
        raise ConfigError(f"KVPILOT_KERNELS={wanted!r} is invalid: expected torch, or leave it unset")
    if wanted == "torch":
        return None
    for name in LIBRARIES.get(torch.backends.cpu.get_cpu_capability(), ("_cpu_any",)):
        try:
            return importlib.import_module(f"kvpilot.engine.kernels.{name}")
        except ImportError:
            continue
    return None


def library_name(library: ModuleType) -> str:
    """The instruction set in a library's name: "v4", "v3" or "any"."""
    assert library.__spec__ is not None
    return library.__spec__.name.rpartition("_")[2]


class CPUKernels:
    """The functions of `torch_ops`, bound to one library."""

    def __init__(self, library: ModuleType) -> None:
        self._library = library
        self._has_bf16_prefill: bool = library.has_bf16_prefill()

    def rms_norm(self, x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        if not (_is_plain(x_TH) and _is_plain(weight_H)):
            return torch_ops.rms_norm(x_TH, weight_H, eps)
        out = torch.empty_like(x_TH, dtype=weight_H.dtype)
        self._rms_norm(x_TH, weight_H, out, eps)
        return out

    def add_rms_norm(self, x_TH: Tensor, residual_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
        if not (_is_plain(x_TH) and _is_plain(residual_TH) and _is_plain(weight_H)):
            return torch_ops.add_rms_norm(x_TH, residual_TH, weight_H, eps)
        self._library.add_to(
            x_TH.data_ptr(),
            FLOATS[x_TH.dtype],
            residual_TH.data_ptr(),
            FLOATS[residual_TH.dtype],
            x_TH.numel(),
        )
        out = torch.empty_like(residual_TH, dtype=weight_H.dtype)
        self._rms_norm(residual_TH, weight_H, out, eps)
        return out

    def _rms_norm(self, x_TH: Tensor, weight_H: Tensor, out_TH: Tensor, eps: float) -> None:
        hidden = weight_H.numel()
        self._library.rms_norm(
            x_TH.data_ptr(),
            FLOATS[x_TH.dtype],
            weight_H.data_ptr(),
            out_TH.data_ptr(),
            FLOATS[out_TH.dtype],
            x_TH.numel() // hidden,
            hidden,
            eps,
            torch.get_num_threads(),
        )

    def silu_mul(self, gate_up_T2I: Tensor) -> Tensor:
        if not _is_plain(gate_up_T2I):
            return torch_ops.silu_mul(gate_up_T2I)
        inner = gate_up_T2I.shape[-1] // 2
        out = gate_up_T2I.new_empty((*gate_up_T2I.shape[:-1], inner))
        self._library.silu_mul(
            gate_up_T2I.data_ptr(),
            out.data_ptr(),
            FLOATS[out.dtype],
            out.numel() // inner,
            inner,
            torch.get_num_threads(),
        )
        return out

    def rope_rotate_write(
        self,
        qkv_TX: Tensor,
        positions: NDArray[np.int64],
        places: NDArray[np.int64],
        rope: RopeTables,
        storage: "TorchStorage",
        layer: int,
        num_heads: int,
    ) -> Tensor:
        if not (_covers(storage, num_heads) and _is_plain(qkv_TX)):
            return torch_ops.rope_rotate_write(qkv_TX, positions, places, rope, storage, layer, num_heads)
        head_dim = storage.shape.head_dim
        q_THD = qkv_TX.new_empty((len(positions), num_heads, head_dim))
        self._library.rope_rotate_write(
            storage.layout,
            layer,
            num_heads,
            len(positions),
            torch.get_num_threads(),
            cache_basis(head_dim) is not None,
            storage.pool.data_ptr(),
            qkv_TX.data_ptr(),
            q_THD.data_ptr(),
            FLOATS[qkv_TX.dtype],
            positions,
            places,
            rope.cos.data_ptr(),
            rope.sin.data_ptr(),
        )
        return q_THD

    def decode_attention(
        self, q_BHD: Tensor, storage: "TorchStorage", layer: int, table: PageTable
    ) -> Tensor:
        if not (_covers(storage, q_BHD.shape[1]) and _is_plain(q_BHD)):
            return torch_ops.decode_attention(q_BHD, storage, layer, table)
        out_BHD = torch.empty_like(q_BHD)
        self._library.decode_attention(
            storage.layout,
            layer,
            q_BHD.shape[1],
            q_BHD.shape[0],
            torch.get_num_threads(),
            storage.pool.data_ptr(),
            q_BHD.data_ptr(),
            out_BHD.data_ptr(),
            FLOATS[q_BHD.dtype],
            table.cells,
            table.indptr,
            table.num_tokens,
        )
        return out_BHD

    def gather_pages(
        self,
        storage: "TorchStorage",
        layer: int,
        cells: NDArray[np.int64],
        num_tokens: int,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        shape = storage.shape
        if not (_covers(storage, shape.num_kv_heads) and dtype in FLOATS):
            return torch_ops.gather_pages(storage, layer, cells, num_tokens, dtype)
        size = (shape.num_kv_heads, num_tokens, shape.head_dim)
        k_HSD, v_HSD = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
        self._library.gather_pages(
            storage.layout,
            layer,
            num_tokens,
            torch.get_num_threads(),
            storage.pool.data_ptr(),
            cells,
            k_HSD.data_ptr(),
            v_HSD.data_ptr(),
            FLOATS[dtype],
        )
        return k_HSD, v_HSD

    def prefill_attention(
        self, q_THD: Tensor, storage: "TorchStorage", layer: int, cells: NDArray[np.int64], start: int
    ) -> Tensor:
        shape, num_tokens = storage.shape, start + len(q_THD)
        is_native = self._has_bf16_prefill and q_THD.dtype == torch.bfloat16 and shape.head_dim % 64 == 0
        if not (is_native and _covers(storage, q_THD.shape[1]) and q_THD.is_contiguous()):
            k_HSD, v_HSD = self.gather_pages(storage, layer, cells, num_tokens, q_THD.dtype)
            return torch_ops.dense_prefill(q_THD, k_HSD, v_HSD, start)
        out_THD = torch.empty_like(q_THD)
        self._library.prefill_attention(
            storage.layout,
            layer,
            q_THD.shape[1],
            len(q_THD),
            start,
            torch.get_num_threads(),
            storage.pool.data_ptr(),
            q_THD.data_ptr(),
            out_THD.data_ptr(),
            cells,
        )
        return out_THD

    def convert_page(self, storage: "TorchStorage", conversion: Conversion) -> None:
        source, from_level, target, to_level = conversion
        if not (storage.pool.is_cpu and _covers(storage, storage.shape.num_kv_heads)):
            torch_ops.convert_page(storage, conversion)
            return
        is_fine = self._library.convert_page(
            storage.layout,
            storage.pool.data_ptr(),
            from_level,
            *source,
            to_level,
            *target,
            torch.get_num_threads(),
        )
        if not is_fine:
            raise NonFiniteError(storage.codecs[to_level].name)


def page_layout(shape: PageShape, ladder: tuple[str, ...]) -> NDArray[np.int64] | None:
    """The struct `Layout` of formats.h; None where native code does not know the shape or a codec of the ladder."""
    is_known = (
        all(name in KINDS for name in ladder)
        and len(ladder) <= MAX_LEVELS
        and shape.head_dim % 16 == 0
        and shape.head_dim <= MAX_HEAD_DIM
        and shape.page_size <= MAX_PAGE_SIZE
    )
    if not is_known:
        return None
    kinds = [KINDS[name] for name in ladder]
    sizes = (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.page_size)
    return np.array([*sizes, *kinds, *[0] * (MAX_LEVELS - len(kinds))], dtype=np.int64)


def _is_plain(x: Tensor) -> bool:
    return x.dtype in FLOATS and x.is_contiguous()


def _covers(storage: "TorchStorage", num_heads: int) -> bool:
    return storage.layout is not None and num_heads // storage.shape.num_kv_heads <= MAX_QUERIES_PER_KV_HEAD
