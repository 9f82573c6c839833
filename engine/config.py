"""The envelope (fixed at start) and the knobs (live, always inside the envelope)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise

from kvpilot.engine.errors import ConfigError, KnobInvalidError
from kvpilot.engine.kv.eviction import ORACLE, POLICIES
from kvpilot.engine.kv.formats import BITS, EXACT_CODECS

MAX_TTL_SECONDS = 86_400.0


@dataclass(frozen=True, kw_only=True)
class Knobs:
    """The four live settings. Each takes effect at the next scheduler step."""

    ttl_seconds: float = 0.0  # how long an idle page is protected from release since its last use
    size_factor: float = 0.0  # largest share of the pool that retained pages may hold
    max_batch: int = 16  # requests admitted together, prefilling and decoding
    kv_level: int = 0  # lowest rung of the ladder that pages may be stepped down to

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


KNOB_NAMES = tuple(f.name for f in fields(Knobs))


@dataclass(frozen=True, kw_only=True)
class KnobBounds:
    """Inclusive bounds of one knob; `scale` says how an optimiser should step through it."""

    low: float
    high: float
    integer: bool
    scale: str  # "linear" or "log"

    def __str__(self) -> str:
        kind = "an integer" if self.integer else "a number"
        return f"{kind} in [{self.low:g}, {self.high:g}]"


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The envelope. Buffers are sized from it; nothing in it changes while the engine runs."""

    pool_bytes: int = 256 << 20  # KV pool, scales included
    page_size: int = 32  # tokens per page
    ladder: tuple[str, ...] = ("bf16", "int8", "int4")  # codecs from full precision down
    max_batch_ceiling: int = 64  # largest value of the knob `max_batch`
    max_model_len: int | None = None  # tokens of prompt + output; None: what model and pool allow
    max_waiting: int = 256  # requests in the queue before new ones get 429
    prefill_chunk: int = 256  # prompt tokens computed per step, over all requests
    eviction: str = "lru"  # a name of `kv.eviction.POLICIES`
    starvation_seconds: float = 300.0  # a request waiting longer goes first and may take retained pages
    reserve_fraction: float = 0.02  # share of the slots that the reclaimer keeps free
    tail_tokens: int = 128  # last tokens of a running sequence that are never stepped below int8
    knobs: Knobs = field(default_factory=Knobs)  # at start

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, bounds: str) -> None:
            if not ok:
                raise ConfigError(f"{name}={getattr(self, name)!r} is invalid: expected {bounds}")

        check(self.pool_bytes > 0, "pool_bytes", "a positive number of bytes")
        check(self.page_size >= 2 and self.page_size % 2 == 0, "page_size", "an even number >= 2")
        known = all(codec in BITS for codec in self.ladder)
        check(bool(self.ladder) and known, "ladder", f"a non-empty list of {', '.join(BITS)}")
        bits = [BITS[codec] for codec in self.ladder]
        falling = all(a > b for a, b in pairwise(bits))
        check(self.ladder[0] in EXACT_CODECS, "ladder", f"to start with one of {EXACT_CODECS}")
        check(falling, "ladder", "each codec smaller than the one before")
        quantized = all(codec not in EXACT_CODECS for codec in self.ladder[1:])
        check(quantized, "ladder", f"only its first codec to be one of {EXACT_CODECS}")
        check(self.max_batch_ceiling >= 1, "max_batch_ceiling", ">= 1")
        check(self.max_model_len is None or self.max_model_len >= 2, "max_model_len", ">= 2 or None")
        check(self.max_waiting >= 1, "max_waiting", ">= 1")
        check(self.prefill_chunk >= 1, "prefill_chunk", ">= 1")
        check(self.eviction in (*POLICIES, ORACLE), "eviction", f"one of {', '.join(POLICIES)}, {ORACLE}")
        check(self.starvation_seconds >= 0, "starvation_seconds", ">= 0")
        check(0 <= self.reserve_fraction < 0.5, "reserve_fraction", "a number in [0, 0.5)")
        check(self.tail_tokens >= 0, "tail_tokens", ">= 0")
        try:
            validate_knobs(self.knobs.as_dict(), self)
        except KnobInvalidError as error:
            raise ConfigError(f"knobs.{error}") from error

    def with_(self, **changes: object) -> "EngineConfig":
        return replace(self, **changes)  # pyright: ignore[reportArgumentType]


def knob_bounds(config: EngineConfig) -> dict[str, KnobBounds]:
    """The hard bounds of every knob within this envelope."""
    return {
        "ttl_seconds": KnobBounds(low=0.0, high=MAX_TTL_SECONDS, integer=False, scale="log"),
        "size_factor": KnobBounds(low=0.0, high=1.0, integer=False, scale="linear"),
        "max_batch": KnobBounds(low=1, high=config.max_batch_ceiling, integer=True, scale="log"),
        "kv_level": KnobBounds(low=0, high=len(config.ladder) - 1, integer=True, scale="linear"),
    }


def validate_knobs(changes: Mapping[str, object], config: EngineConfig) -> dict[str, float | int]:
    """The changes in their proper types; raises KnobInvalidError for the first one that is not in bounds."""
    bounds = knob_bounds(config)
    clean: dict[str, float | int] = {}
    for name, value in changes.items():
        if name not in bounds:
            raise KnobInvalidError(name, value, f"one of {', '.join(KNOB_NAMES)}")
        limit = bounds[name]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise KnobInvalidError(name, value, str(limit))
        if not limit.low <= value <= limit.high or (limit.integer and value != int(value)):
            raise KnobInvalidError(name, value, str(limit))
        clean[name] = int(value) if limit.integer else float(value)
    return clean
