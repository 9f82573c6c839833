"""The unquantized precisions; one of them is level 0 of every ladder."""

import torch
from torch import Tensor

from kvpilot.engine.kv.codecs.base import Codec, NonFiniteError


class ExactCodec(Codec):
    """K and V as they are, in `dtype`."""

    dtype: torch.dtype

    def encode(self, k_LHPD: Tensor, v_LHPD: Tensor, payload: Tensor, scales: Tensor) -> None:
        values = torch.stack((k_LHPD, v_LHPD), dim=1).to(self.dtype)
        if not values.isfinite().all():
            raise NonFiniteError(self.name)
        self._rows(payload, self.shape.head_dim * self.dtype.itemsize).copy_(values.view(torch.uint8))

    def decode(self, payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        row_bytes = self.shape.head_dim * self.dtype.itemsize
        values = self._rows(payload, row_bytes).view(self.dtype).to(torch.float32, copy=True)
        k_LHPD, v_LHPD = values.unbind(1)
        return k_LHPD, v_LHPD


class BF16Codec(ExactCodec):
    name = "bf16"
    dtype = torch.bfloat16


class FP32Codec(ExactCodec):
    name = "fp32"
    dtype = torch.float32
