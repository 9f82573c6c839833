"""One byte per value under an fp16 scale per (token, kv head)."""

from abc import abstractmethod

import torch
from torch import Tensor

from kvpilot.engine.kv.codecs.base import Codec, NonFiniteError


class ScaledByteCodec(Codec):
    """value = code * scale. The largest magnitude of each (token, head) maps to `largest_code`."""

    largest_code: float

    def encode(self, k_LHPD: Tensor, v_LHPD: Tensor, payload: Tensor, scales: Tensor) -> None:
        values = torch.stack((k_LHPD, v_LHPD), dim=1).float()
        scale = (values.abs().amax(-1) / self.largest_code).half()
        if not scale.isfinite().all():  # amax passes NaN on
            raise NonFiniteError(self.name)
        divisor = scale.float().clamp_min(torch.finfo(torch.float32).tiny)  # a zero scale: codes are ignored
        codes = (values / divisor[..., None]).clamp_(-self.largest_code, self.largest_code)
        self._rows(payload, self.shape.head_dim).copy_(self._to_bytes(codes))
        scales.view(torch.float16).view(scale.shape).copy_(scale)

    def decode(self, payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        codes = self._from_bytes(self._rows(payload, self.shape.head_dim))
        scale = scales.view(torch.float16).view(codes.shape[:-1]).float()
        k_LHPD, v_LHPD = (codes * scale[..., None]).unbind(1)
        return k_LHPD, v_LHPD

    @staticmethod
    @abstractmethod
    def _to_bytes(codes: Tensor) -> Tensor: ...

    @staticmethod
    @abstractmethod
    def _from_bytes(raw: Tensor) -> Tensor: ...
