"""The pool's bytes as one tensor, and the page operations that the bookkeeping asks for."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvpilot.engine import kernels
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kernels.cpu import page_layout
from kvpilot.engine.kv.codecs import Codec, make_codec
from kvpilot.engine.kv.codecs.exact import ExactCodec
from kvpilot.engine.kv.formats import EXACT_CODECS, PageShape
from kvpilot.engine.kv.storage import Conversion, Move


class TorchStorage:
    """Implements PageStorage over a uint8 tensor of `pool_bytes` bytes.

    Cells may start at any multiple of 4 bytes. Fresh memory holds garbage: readers must know how many
    tokens of an open page are valid.
    """

    def __init__(
        self,
        shape: PageShape,
        ladder: Sequence[str],
        pool_bytes: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.shape = shape
        self.codecs: tuple[Codec, ...] = tuple(make_codec(name, shape) for name in ladder)
        if not isinstance(self.codecs[0], ExactCodec):
            raise ConfigError(f"ladder={tuple(ladder)!r} is invalid: expected to start with {EXACT_CODECS}")
        self.dtype: torch.dtype = self.codecs[0].dtype  # of open pages
        if pool_bytes < self.codecs[0].payload_bytes:
            raise ConfigError(
                f"pool_bytes={pool_bytes} is invalid: expected at least one {ladder[0]} page of "
                f"{self.codecs[0].payload_bytes} bytes"
            )
        self.layout = page_layout(shape, tuple(ladder))  # for native code; None: it cannot read this pool
        self.pool: Tensor = _allocate(pool_bytes, torch.device(device))

    def convert(self, conversions: list[Conversion]) -> None:
        """Re-encodes pages, in order. NonFiniteError stops at the first refused page: earlier ones are done,
        its source and all later ones are untouched."""
        for conversion in conversions:
            kernels.convert_page(self, conversion)

    def move(self, moves: list[Move]) -> None:
        """Copies byte ranges, in order."""
        for source, target, num_bytes in moves:
            self.pool[target : target + num_bytes].copy_(self.pool[source : source + num_bytes])

    def read_page(self, level: int, payload: int, scales: int) -> tuple[Tensor, Tensor]:
        """K and V of the page in this cell, as float32 [L, H, P, D]."""
        return self.codecs[level].decode(*self._cell(level, payload, scales))

    def write_page(self, level: int, payload: int, scales: int, k_LHPD: Tensor, v_LHPD: Tensor) -> None:
        """Encodes K and V [L, H, P, D] into this cell; raises NonFiniteError before writing."""
        self.codecs[level].encode(k_LHPD, v_LHPD, *self._cell(level, payload, scales))

    def read_layer(self, level: int, payload: int, scales: int, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer of a page, as float32 [H, P, D]."""
        codec = self.codecs[level]
        num_payload = codec.payload_bytes // self.shape.num_layers
        num_scales = codec.scale_bytes // self.shape.num_layers
        payload_view = self.pool.narrow(0, payload + layer * num_payload, num_payload)
        scale_view = self.pool.narrow(0, max(scales, 0) + layer * num_scales, num_scales)
        k_LHPD, v_LHPD = codec.decode(payload_view, scale_view)
        return k_LHPD[0], v_LHPD[0]

    def _cell(self, level: int, payload: int, scales: int) -> tuple[Tensor, Tensor]:
        codec = self.codecs[level]
        return (
            self.pool.narrow(0, payload, codec.payload_bytes),
            self.pool.narrow(0, max(scales, 0), codec.scale_bytes),
        )


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Uninitialised bytes from a multiple of 64. On a CPU numpy allocates: it asks for huge pages, without
    which attention over many pages spends much of its time on address translation."""
    if device.type != "cpu":
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)
    try:
        padded = torch.from_numpy(np.empty(num_bytes + 63, dtype=np.uint8))
    except (MemoryError, ValueError) as error:
        raise ConfigError(
            f"pool_bytes={num_bytes} cannot be allocated: expected less than this machine's free memory"
        ) from error
    return padded[-padded.data_ptr() % 64 :][:num_bytes]
