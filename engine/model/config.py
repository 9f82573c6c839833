"""The shape of a model, free of torch: what a checkpoint says, checked and resolved."""

import math
from dataclasses import dataclass

from kvpilot.engine.errors import ModelError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder of the Llama family: RMS norm, rotary embedding (half-split), grouped queries, SwiGLU."""

    architecture: str  # one of ARCHITECTURES
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int  # rows of the embedding; the tokenizer may know fewer
    max_position: int  # longest sequence in tokens that full attention is right for
    rope_theta: float = 10_000.0
    rope_divisors: tuple[float, ...] = ()  # of the head_dim / 2 inverse frequencies; empty: unscaled
    rms_eps: float = 1e-5
    tied_embeddings: bool = False  # the output head is the embedding table
    qkv_bias: bool = False
    qk_norm: bool = False  # RMS norm of every q and k head before the rotary embedding
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, bounds: str) -> None:
            if not ok:
                raise ModelError(f"{name}={getattr(self, name)!r} is invalid: expected {bounds}")

        check(self.architecture in ARCHITECTURES, "architecture", f"one of {', '.join(ARCHITECTURES)}")
        sizes = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim")
        for name in (*sizes, "intermediate_size", "vocab_size", "max_position"):
            check(getattr(self, name) >= 1, name, "an integer >= 1")
        check(self.num_heads % self.num_kv_heads == 0, "num_kv_heads", f"a divisor of {self.num_heads} heads")
        check(self.head_dim % 2 == 0, "head_dim", "an even number")
        check(math.isfinite(self.rope_theta) and self.rope_theta > 0, "rope_theta", "a positive number")
        check(math.isfinite(self.rms_eps) and self.rms_eps > 0, "rms_eps", "a positive number")
        check(
            len(self.rope_divisors) in (0, self.head_dim // 2),
            "rope_divisors",
            f"{self.head_dim // 2} or none",
        )
        check(all(d > 0 for d in self.rope_divisors), "rope_divisors", "positive numbers")

    @property
    def qkv_size(self) -> int:
        """Values per token of the fused projection [q heads | k heads | v heads] x head_dim."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @property
    def rope_inverse_frequencies(self) -> tuple[float, ...]:
        """Radians per position of the pairs (i, i + head_dim / 2), scaling included."""
        return tuple(
            frequency / divisor
            for frequency, divisor in zip(
                unscaled_frequencies(self.rope_theta, self.head_dim),
                self.rope_divisors or (1.0,) * (self.head_dim // 2),
                strict=True,
            )
        )


def unscaled_frequencies(theta: float, head_dim: int) -> list[float]:
    return [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]


def rope_divisors(kind: str, scaling: dict, theta: float, head_dim: int) -> tuple[float, ...]:
    """Resolves a checkpoint's rope scaling (keys as in config.json); ModelError if it is not supported.

    `llama3` divides low frequencies by `factor`, keeps high ones, and blends in between (Llama 3.1 report).
    """
    half = head_dim // 2
    if kind in ("default", "none", ""):
        return ()
    if kind == "linear":
        return (_number(scaling, "factor"),) * half
    if kind != "llama3":
        raise ModelError(f"rope scaling {kind!r} is not supported: expected none, linear or llama3")
    factor = _number(scaling, "factor")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    original = _number(scaling, "original_max_position_embeddings")
    if high <= low:
        raise ModelError(f"rope scaling high_freq_factor={high} is invalid: expected > low_freq_factor={low}")
    divisors = []
    for frequency in unscaled_frequencies(theta, head_dim):
        turns = original * frequency / (2 * math.pi)  # within the original context
        keep = min(1.0, max(0.0, (turns - low) / (high - low)))
        divisors.append(1 / ((1 - keep) / factor + keep))
    return tuple(divisors)


def _number(scaling: dict, name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ModelError(f"rope scaling {name}={value!r} is invalid: expected a positive number")
    return float(value)
