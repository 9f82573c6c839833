"""Precisions of the KV cache. `make_codec` resolves the names of a configured ladder."""

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.codecs.base import Codec, NonFiniteError
from kvpilot.engine.kv.codecs.exact import BF16Codec, FP32Codec
from kvpilot.engine.kv.codecs.fp8 import FP8Codec
from kvpilot.engine.kv.codecs.int4 import Int4Codec
from kvpilot.engine.kv.codecs.int8 import Int8Codec
from kvpilot.engine.kv.formats import PageShape

__all__ = ["Codec", "NonFiniteError", "make_codec"]

CODECS: dict[str, type[Codec]] = {
    codec.name: codec for codec in (FP32Codec, BF16Codec, Int8Codec, FP8Codec, Int4Codec)
}


def make_codec(name: str, shape: PageShape) -> Codec:
    """The codec called `name`, for pages of `shape`; raises ConfigError for an unknown name."""
    if name not in CODECS:
        raise ConfigError(f"codec={name!r} is invalid: expected one of {', '.join(CODECS)}")
    return CODECS[name](shape)
