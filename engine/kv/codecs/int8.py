"""int8, symmetric."""

import torch
from torch import Tensor

from kvpilot.engine.kv.codecs.scaled import ScaledByteCodec


class Int8Codec(ScaledByteCodec):
    """Near lossless: about 0.00007 nats of KL in the rotated basis."""

    name = "int8"
    largest_code = 127.0

    @staticmethod
    def _to_bytes(codes: Tensor) -> Tensor:
        return codes.round().to(torch.int8).view(torch.uint8)

    @staticmethod
    def _from_bytes(raw: Tensor) -> Tensor:
        return raw.view(torch.int8).float()
