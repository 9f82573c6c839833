"""What a precision of the KV cache is: an encoding of one page's K and V.

Shape suffixes: L layers, H kv heads, P tokens of a page, D head_dim. The byte layout is fixed by
`kvpilot.engine.kv.formats`; any number of whole layers can be encoded or decoded, since payload and
scales are contiguous over layers.
"""

from abc import ABC, abstractmethod

from torch import Tensor

from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes


class NonFiniteError(KVPilotError):
    """K or V holds a NaN, an infinity, or a value too large for the codec; nothing was written."""

    def __init__(self, codec: str) -> None:
        super().__init__(
            f"codec={codec!r} refuses the page: K or V is NaN, infinite or beyond the range of fp16 scales; "
            "the page keeps its old precision. The model's activations overflowed: compute in float32"
        )


class Codec(ABC):
    """Encodes K and V of one page. `payload` and `scales` are uint8 views into the pool."""

    name: str

    def __init__(self, shape: PageShape) -> None:
        self.shape = shape

    @property
    def payload_bytes(self) -> int:
        return payload_bytes(self.name, self.shape)

    @property
    def scale_bytes(self) -> int:
        return scale_bytes(self.name, self.shape)

    @abstractmethod
    def encode(self, k_LHPD: Tensor, v_LHPD: Tensor, payload: Tensor, scales: Tensor) -> None:
        """Writes both views in full. Raises NonFiniteError before the first byte is written."""

    @abstractmethod
    def decode(self, payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        """K and V as float32 [L, H, P, D], freshly allocated."""

    def _rows(self, payload: Tensor, row_bytes: int) -> Tensor:
        """The payload as [L, K|V, H, P, row_bytes] bytes."""
        return payload.view(-1, 2, self.shape.num_kv_heads, self.shape.page_size, row_bytes)
