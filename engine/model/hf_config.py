"""From the config.json of Hugging Face to a ModelConfig."""

from typing import Any

from kvpilot.engine.errors import ModelError
from kvpilot.engine.model.config import ModelConfig, rope_divisors

_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


def model_config(raw: dict[str, Any], generation: dict[str, Any], has_qkv_bias: bool) -> ModelConfig:
    """`raw` is config.json, `generation` generation_config.json; ModelError for what we do not compute."""
    names = raw.get("architectures") or []
    known = [_ARCHITECTURES[name] for name in names if name in _ARCHITECTURES]
    if not known:
        raise ModelError(
            f"architectures={names!r} is not supported: expected one of {', '.join(_ARCHITECTURES)}"
        )
    if raw.get("quantization_config"):
        raise ModelError(
            "quantization_config: quantized safetensors are not supported; use the float or GGUF version"
        )
    if raw.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act={raw['hidden_act']!r} is not supported: expected silu")
    heads, hidden = _integer(raw, "num_attention_heads"), _integer(raw, "hidden_size")
    head_dim = raw.get("head_dim") or hidden // heads
    theta, divisors = _rope(raw, head_dim)
    ends = generation.get("eos_token_id"), raw.get("eos_token_id")
    return ModelConfig(
        architecture=known[0],
        num_layers=_integer(raw, "num_hidden_layers"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=raw.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate_size=_integer(raw, "intermediate_size"),
        vocab_size=_integer(raw, "vocab_size"),
        max_position=_full_attention_span(raw),
        rope_theta=theta,
        rope_divisors=divisors,
        rms_eps=raw.get("rms_norm_eps", 1e-6),
        tied_embeddings=raw.get("tie_word_embeddings", False),
        qkv_bias=has_qkv_bias,
        qk_norm=known[0] == "qwen3",
        bos_token_id=raw.get("bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(i for entry in ends for i in _as_list(entry))),
    )


def _full_attention_span(raw: dict[str, Any]) -> int:
    """Sequences no longer than a sliding window see all of themselves: up to there the model is exact."""
    longest = _integer(raw, "max_position_embeddings")
    window = raw.get("sliding_window") or longest
    # Qwen names a window that it uses only if told to; Mistral uses the one it names.
    active = raw.get("use_sliding_window", raw.get("model_type") == "mistral")
    return min(longest, window) if active else longest


def _rope(raw: dict[str, Any], head_dim: int) -> tuple[float, tuple[float, ...]]:
    """Both spellings: `rope_parameters` (with the base inside) and `rope_theta` + `rope_scaling`."""
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if scaling.get("partial_rotary_factor", raw.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError("partial_rotary_factor is not supported: expected 1.0")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return theta, rope_divisors(kind, scaling, theta, head_dim)


def _integer(raw: dict[str, Any], name: str) -> int:
    value = raw.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{name}={value!r} is invalid: expected an integer")
    return value


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]
