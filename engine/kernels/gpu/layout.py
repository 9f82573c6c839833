"""How quantized pages lie in GPU memory: the bytes of `kvpilot.engine.kv.formats`, rearranged within blocks.

Payloads stay `[layer, K|V, head, block]` and the exact codec is the same on every device. Blocks:

* int8: K [token, dim] and V [dim, token], as unsigned `code + 128`. fp8: the same places, e4m3 bits.
  Scales `[layer, head, token]`, one 32-bit word each: fp16 of K in the low half, of V in the high half.
* int4: K [token, dim / 2] with dims j and j + dim / 2 in the low and high half of a byte, V [dim, token / 2]
  with the codes of token t and 15 - the code of token t + page_size / 2: what the two halves of a page add to a sum
  has opposite signs, because tensor cores cut what they accumulate, and the larger the sum the more. Of four
  bytes in a row the middle two are exchanged, so that two halves of a word unpack into neighbours.
  Scales `[layer, head]` records of 32-bit words: dim / 2 words of bytes (scale j, scale j + dim / 2, min j + 128,
  min j + dim / 2 + 128), one word of the fp16 units (scale, min), page_size words of V's fp16 (scale, min).

V is transposed so that the contraction runs over the contiguous index in both products.
"""

from functools import cache

import torch
from torch import Tensor

from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kv.formats import Int4Record, PageShape, payload_bytes, scale_bytes

EXACT, INT8, FP8, INT4 = range(4)
KINDS = {"bf16": EXACT, "int8": INT8, "fp8": FP8, "int4": INT4}
HEAD_DIMS = (64, 128)
PAGE_SIZES = (32, 64)
MAX_QUERIES_PER_KV_HEAD = 8


def check_supported(shape: PageShape, ladder: tuple[str, ...], num_heads: int) -> None:
    """Raises ConfigError unless the GPU kernels cover this model, page size and ladder."""
    for name, value, allowed in (
        ("head_dim", shape.head_dim, HEAD_DIMS),
        ("page_size", shape.page_size, PAGE_SIZES),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}={value} is invalid: the GPU kernels expect one of {allowed}")
    if any(codec not in KINDS for codec in ladder):
        raise ConfigError(f"ladder={ladder!r} is invalid: on a GPU expected codecs of {', '.join(KINDS)}")
    group = num_heads // shape.num_kv_heads
    if group > MAX_QUERIES_PER_KV_HEAD:
        raise ConfigError(
            f"num_heads={num_heads} is invalid: the GPU kernels expect at most {MAX_QUERIES_PER_KV_HEAD} "
            f"query heads per kv head, not {group}"
        )


def to_gpu(codec: str, shape: PageShape, payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """A page's cells (uint8) as the CPU codecs write them -> as the GPU kernels read them; copies."""
    if codec == "bf16":
        return payload.clone(), scales.clone()
    source, flip = _payload_permutation(codec, shape)
    scale_source, scale_flip = _scale_permutation(codec, shape)
    if codec == "int4":
        payload = _pair_tokens(payload, shape)
    return payload[source] ^ flip, scales[scale_source] ^ scale_flip


def from_gpu(codec: str, shape: PageShape, payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `to_gpu`."""
    if codec == "bf16":
        return payload.clone(), scales.clone()
    source, flip = _payload_permutation(codec, shape)
    scale_source, scale_flip = _scale_permutation(codec, shape)
    result, scale_result = torch.empty_like(payload), torch.empty_like(scales)
    result[source] = payload ^ flip
    scale_result[scale_source] = scales ^ scale_flip
    return (_unpair_tokens(result, shape) if codec == "int4" else result), scale_result


@cache
def _payload_permutation(codec: str, shape: PageShape) -> tuple[Tensor, Tensor | int]:
    """Index of the source byte of each byte, and what to xor it with."""
    dim, tokens = shape.head_dim, shape.page_size
    index = torch.arange(payload_bytes(codec, shape)).view(shape.num_layers, 2, shape.num_kv_heads, -1)
    k, v = index.unbind(1)
    if codec == "int4":  # V comes as [token / 2, dim] pairs
        v = v.unflatten(-1, (tokens // 2, dim)).mT.flatten(-2)
        index = torch.stack((k, v), dim=1).view(-1, 4)[:, (0, 2, 1, 3)]
        flip = torch.zeros(shape.num_layers, 2, k[0].numel(), dtype=torch.uint8)
        flip[:, 1] = 0xF0
        return index.reshape(-1), flip.view(-1)
    v = v.unflatten(-1, (tokens, dim)).mT.flatten(-2)
    return torch.stack((k, v), dim=1).reshape(-1), 128 if codec == "int8" else 0


@cache
def _scale_permutation(codec: str, shape: PageShape) -> tuple[Tensor, Tensor]:
    index = torch.arange(scale_bytes(codec, shape))
    if codec != "int4":  # [layer, K|V, head, token, 2 bytes] -> [layer, head, token, K|V, 2 bytes]
        index = index.view(shape.num_layers, 2, shape.num_kv_heads, shape.page_size, 2)
        index = index.permute(0, 2, 3, 1, 4).reshape(-1)
        return index, torch.zeros_like(index, dtype=torch.uint8)
    record = Int4Record.of(shape)
    index = index.view(-1, record.num_bytes)
    half = shape.head_dim // 2
    channels = index[:, : record.k_units].view(-1, 2, 2, half)  # (scales, mins), half, j
    channels = channels.permute(0, 3, 1, 2).reshape(-1, record.k_units)
    units = index[:, record.k_units : record.v_scales]
    tokens = index[:, record.v_scales :].view(-1, 2, shape.page_size, 2).transpose(1, 2)
    order = torch.cat((channels, units, tokens.flatten(1)), dim=1)
    flip = torch.zeros_like(order, dtype=torch.uint8)
    flip[:, : record.k_units].view(-1, half, 4)[..., 2:] = 128
    return order.reshape(-1), flip.reshape(-1)


def _pair_tokens(payload: Tensor, shape: PageShape) -> Tensor:
    """V of int4 from rows of (dim j, dim j + D / 2) to rows of (token t, token t + P / 2) per dim."""
    rows = payload.clone().view(shape.num_layers, 2, shape.num_kv_heads, shape.page_size, -1)
    codes = torch.cat((rows[:, 1] & 15, rows[:, 1] >> 4), dim=-1)
    low, high = codes.chunk(2, dim=-2)
    rows[:, 1] = (low | (high << 4)).reshape(rows[:, 1].shape)
    return rows.view(-1)


def _unpair_tokens(payload: Tensor, shape: PageShape) -> Tensor:
    rows = payload.clone().view(shape.num_layers, 2, shape.num_kv_heads, shape.page_size, -1)
    pairs = rows[:, 1].reshape(shape.num_layers, shape.num_kv_heads, shape.page_size // 2, shape.head_dim)
    codes = torch.cat((pairs & 15, pairs >> 4), dim=-2)
    low, high = codes.chunk(2, dim=-1)
    rows[:, 1] = low | (high << 4)
    return rows.view(-1)
