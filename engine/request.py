"""The nouns of serving: what a user asks for, what the scheduler holds, what one step runs and returns."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from kvpilot.engine.errors import RequestError

if TYPE_CHECKING:
    from kvpilot.engine.kv.page import Page


class FinishReason(StrEnum):
    STOP = "stop"  # end token, stop token or stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the client went away
    ERROR = "error"  # the engine failed on it


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to draw tokens. `temperature=0` is greedy; `top_k=0` and `top_p=1` keep all tokens."""

    max_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    logprobs: int | None = None  # how many alternatives to report per token (0: the token's own only)
    stop_token_ids: frozenset[int] = frozenset()  # end the text, and are not part of it
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, bounds: str) -> None:
            if not ok:
                raise RequestError(f"{name}={getattr(self, name)!r} is invalid: expected {bounds}", name)

        check(self.max_tokens >= 1, "max_tokens", ">= 1")
        check(0 <= self.temperature <= 2, "temperature", "a number in [0, 2]")
        check(0 < self.top_p <= 1, "top_p", "a number in (0, 1]")
        check(self.top_k >= 0, "top_k", ">= 0 (0 keeps all)")
        check(self.logprobs is None or 0 <= self.logprobs <= 20, "logprobs", "an integer in [0, 20]")


@dataclass(eq=False, kw_only=True)
class Request:
    """One sequence from arrival to finish. The scheduler owns every field below the line.

    `block_hash(i)` gives the chained hash of the i-th full page of prompt + output; it is called only
    when that page is complete. `num_tokens` counts prompt and output; the values themselves are kept in
    `tokens` by the engine (the simulator has none). `max_kv_level` is the coarsest level of the ladder that its
    pages may have while it runs; None leaves that to the knob `kv_level`.
    """

    request_id: str
    num_prompt_tokens: int
    max_tokens: int
    arrival_time: float  # seconds, on the engine's clock
    block_hash: Callable[[int], Hashable]
    sampling: SamplingParams | None = None
    tokens: list[int] | None = None  # prompt, then output
    max_kv_level: int | None = None
    traceparent: str | None = None  # W3C trace context of the client's span, for the server's spans
    # ------------------------------------------------------------------ owned by the scheduler
    num_tokens: int = 0  # prompt + output so far
    num_computed: int = 0  # tokens whose K and V are in the pages
    num_cached: int = 0  # prompt tokens found in the prefix cache at (first) admission
    # page i holds tokens [i * page_size, (i+1) * page_size)
    pages: list["Page"] = field(default_factory=list)
    num_sealed: int = 0  # leading pages that are sealed
    is_decoding: bool = False  # admitted, and all but the last token computed
    num_known_pages: int = 0  # while waiting: leading pages that the prefix cache has
    turn: int = 1  # of the conversation, as far as the prefix cache can tell
    num_preemptions: int = 0
    first_admission_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finish_time: float | None = None
    finish_reason: FinishReason | None = None

    def __post_init__(self) -> None:
        self.num_tokens = self.num_prompt_tokens

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_prefilling(self) -> bool:
        """More than the one token that a decode step computes is missing."""
        return self.num_tokens - self.num_computed > 1

    @property
    def is_answered(self) -> bool:
        """It ended with all of its answer: neither aborted nor failed."""
        return self.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    @property
    def mean_gap_seconds(self) -> float | None:
        """Between two tokens of the output; None for fewer than two."""
        gaps = self.num_output_tokens - 1
        if self.first_token_time is None or self.last_token_time is None or gaps < 1:
            return None
        return (self.last_token_time - self.first_token_time) / gaps


class ScheduledRequest(NamedTuple):
    """`num_new` tokens from position `start` are computed in this step; `samples` if the last one gives a token."""

    request: Request
    start: int
    num_new: int
    samples: bool


class TokenLogprobs(NamedTuple):
    """Log-probabilities (nats) of the chosen token and of the most likely ones."""

    chosen: float
    top: list[tuple[int, float]]


class SampledToken(NamedTuple):
    token: int
    logprobs: TokenLogprobs | None = None


class StepOutput(NamedTuple):
    """What one step did to one request. `token` is None if it produced none (prefill chunk, abort)."""

    request: Request
    token: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None
