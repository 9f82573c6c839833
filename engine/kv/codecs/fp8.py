"""fp8 e4m3, for comparison: the size of int8 with a coarser mantissa."""

import torch
from torch import Tensor

from kvpilot.engine.kv.codecs.scaled import ScaledByteCodec


class FP8Codec(ScaledByteCodec):
    """e4m3 without infinities; 448 is the largest code."""

    name = "fp8"
    largest_code = 448.0

    @staticmethod
    def _to_bytes(codes: Tensor) -> Tensor:
        return codes.to(torch.float8_e4m3fn).view(torch.uint8)

    @staticmethod
    def _from_bytes(raw: Tensor) -> Tensor:
        return raw.view(torch.float8_e4m3fn).float()
