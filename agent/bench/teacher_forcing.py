"""Windows of text through the engine's own pool and attention, one page per step, each page re-encoded once full.

Shape suffixes: W windows, P tokens of a page, V vocabulary, L layers, H kv heads, D head_dim.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor

from kvpilot.engine.attention import PagedAttention, rope_tables
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.kernels.torch_ops import cache_basis
from kvpilot.engine.kv.codecs import make_codec
from kvpilot.engine.kv.formats import PageShape, payload_bytes, scale_bytes
from kvpilot.engine.kv.pool import KVPool, Page
from kvpilot.engine.kv.torch_storage import TorchStorage
from kvpilot.engine.model.load import LoadedModel
from kvpilot.engine.request import Request, ScheduledRequest

EXACT = "fp32"  # of open pages, and of the cache compared with
LADDERS = {EXACT: (EXACT,), "int8": (EXACT, "int8"), "fp8": (EXACT, "fp8"), "int4": (EXACT, "int8", "int4")}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How sealed pages are kept.

    As shipped, the pool itself steps real pages down. With an ingredient left out, a page takes the values that
    the codec returns, written back at full precision: the same numbers reach attention.
    """

    name: str
    codec: str
    tail_tokens: int = 0  # of the last sealed pages, which keep 8 bits
    protects_sink: bool = True  # the first page keeps 8 bits
    is_rotated: bool = True  # encoded in the Hadamard basis

    def __post_init__(self) -> None:
        if self.codec not in LADDERS:
            raise ConfigError(f"codec={self.codec!r} is invalid: expected one of {', '.join(LADDERS)}")
        if not self.is_shipped and self.tail_tokens:
            raise ConfigError(
                f"tail_tokens={self.tail_tokens} is invalid: expected 0 with an ingredient left out"
            )

    @property
    def is_shipped(self) -> bool:
        return self.protects_sink and self.is_rotated


class PagedWindows:
    """`num_windows` windows of `num_pages` pages, side by side, under one recipe."""

    def __init__(self, model: LoadedModel, recipe: Recipe, *, num_windows: int, num_pages: int) -> None:
        config = model.config
        self.recipe = recipe
        self._llama = model.llama
        self._shape = PageShape(
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim
        )
        ladder = LADDERS[recipe.codec] if recipe.is_shipped else (EXACT,)
        slots = num_windows * num_pages + 2 * len(ladder)
        pool_bytes = slots * payload_bytes(EXACT, self._shape)
        storage = TorchStorage(self._shape, ladder, pool_bytes)
        self._storage = storage
        self._pool = KVPool(shape=self._shape, ladder=ladder, pool_bytes=pool_bytes, storage=storage)
        rope = rope_tables(config.rope_inverse_frequencies, num_pages * self._shape.page_size)
        self._attention = PagedAttention(self._shape, config.num_heads, storage, rope)
        self._requests = [_window(i, num_pages * self._shape.page_size) for i in range(num_windows)]

    @property
    def page_size(self) -> int:
        return self._shape.page_size

    @torch.inference_mode()
    def step(self, tokens_WP: Tensor) -> Tensor:
        """Logits [W * P, V] of each window's next page of tokens, which is then sealed and re-encoded."""
        start = len(self._requests[0].pages) * self.page_size
        for request in self._requests:
            request.pages.append(self._pool.allocate())
        batch = [ScheduledRequest(request, start, self.page_size, False) for request in self._requests]
        plan = self._attention.plan(batch)
        hidden = self._llama.forward(
            tokens_WP.flatten(), lambda layer, qkv: self._attention(layer, qkv, plan)
        )
        logits = self._llama.logits(hidden)
        for request in self._requests:
            self._seal(request.pages)
        return logits

    def relative_bytes(self) -> float:
        """Bytes of the sealed pages, scales included, relative to bf16."""
        codecs = [
            self._codec_of(i, page) for request in self._requests for i, page in enumerate(request.pages)
        ]
        total = sum(payload_bytes(codec, self._shape) + scale_bytes(codec, self._shape) for codec in codecs)
        return total / (len(codecs) * payload_bytes("bf16", self._shape))

    def _codec_of(self, index: int, page: Page) -> str:
        if self.recipe.is_shipped:
            return self._pool.ladder[page.level]
        return "int8" if index == 0 and self.recipe.protects_sink else self.recipe.codec

    def _seal(self, pages: list[Page]) -> None:
        """What the engine does under pressure, at once: every page as low as the pool allows it to go."""
        page, index = pages[-1], len(pages) - 1
        self._pool.seal(page, is_sink=index == 0)
        if not self.recipe.is_shipped:
            self._write_back(page, self._codec_of(index, page))
            return
        tail = pages[-ceil(self.recipe.tail_tokens / self.page_size) :] if self.recipe.tail_tokens else []
        for page in pages:
            page.guards = int(page in tail)
            while page.level < self._pool.floor_level(page):
                assert self._pool.has_cells(page.level + 1)
                if not self._pool.step_down(page):
                    raise ConfigError(f"codec={self.recipe.codec!r} cannot encode this model's K and V")

    def _write_back(self, page: Page, codec_name: str) -> None:
        codec = make_codec(codec_name, self._shape)
        payload = torch.empty(codec.payload_bytes, dtype=torch.uint8)
        scales = torch.empty(codec.scale_bytes, dtype=torch.uint8)
        basis = None if self.recipe.is_rotated else cache_basis(self._shape.head_dim)
        k_LHPD, v_LHPD = self._storage.read_page(0, page.payload, page.scales)
        codec.encode(_rotated(k_LHPD, basis), _rotated(v_LHPD, basis), payload, scales)
        k_LHPD, v_LHPD = codec.decode(payload, scales)
        self._storage.write_page(
            0, page.payload, page.scales, _rotated(k_LHPD, basis), _rotated(v_LHPD, basis)
        )


def _rotated(x_LHPD: Tensor, basis: Tensor | None) -> Tensor:
    """Out of the cache's basis or into it: Hadamard's matrix is its own inverse."""
    return x_LHPD if basis is None else x_LHPD @ basis


def _window(index: int, num_tokens: int) -> Request:
    """A carrier of pages; it is never scheduled, so nothing asks for its hashes."""
    return Request(
        request_id=f"window-{index}",
        num_prompt_tokens=num_tokens,
        max_tokens=1,
        arrival_time=0.0,
        block_hash=lambda block: block,
    )
