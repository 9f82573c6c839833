"""Sizes of a page in each precision. No torch here: the simulator uses this module as it is.

A page holds K and V of `page_size` tokens for every layer and kv head. Its *payload* (codes) and its *scales*
live in separate cells of the pool, each contiguous over layers and laid out `[layer, K|V, head, token, dim]`
(`[layer, head, Int4Record]` for the scales of int4). Byte j of an int4 row holds dim j in its low half and
dim j + head_dim / 2 in its high half.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PageShape:
    """What one page covers: `num_layers` x (K, V) x `num_kv_heads` x `page_size` tokens x `head_dim`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_size: int = 32

    @property
    def num_values(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.page_size * self.head_dim

    @property
    def num_heads_total(self) -> int:
        """(layer, kv head) pairs in a page."""
        return self.num_layers * self.num_kv_heads


def payload_bytes(codec: str, shape: PageShape) -> int:
    """Bytes of a page's codes."""
    return shape.num_values * BITS[codec] // 8


def scale_bytes(codec: str, shape: PageShape) -> int:
    """Bytes of a page's scales (0 for the unquantized codecs)."""
    if codec in ("int8", "fp8"):  # one fp16 per token for K and for V
        return shape.num_heads_total * 2 * shape.page_size * 2
    if codec == "int4":
        return shape.num_heads_total * Int4Record.of(shape).num_bytes
    return 0


@dataclass(frozen=True, kw_only=True)
class Int4Record:
    """Byte offsets within the scales of one (layer, kv head) of an int4 page; it starts with `k_scales` u8[D].

    K of channel d is `code * k_scales[d] * k_units[0] + k_mins[d] * k_units[1]`; V of token p is
    `code * v_scales[p] + v_mins[p]`.
    """

    k_mins: int  # s8[D]
    k_units: int  # fp16[2]
    v_scales: int  # fp16[P]
    v_mins: int  # fp16[P]
    num_bytes: int

    @classmethod
    def of(cls, shape: PageShape) -> "Int4Record":
        k_units = 2 * shape.head_dim
        v_scales = k_units + 4
        v_mins = v_scales + 2 * shape.page_size
        num_bytes = v_mins + 2 * shape.page_size
        return cls(
            k_mins=shape.head_dim, k_units=k_units, v_scales=v_scales, v_mins=v_mins, num_bytes=num_bytes
        )


BITS = {"fp32": 32, "bf16": 16, "int8": 8, "fp8": 8, "int4": 4}
EXACT_CODECS = ("fp32", "bf16")
