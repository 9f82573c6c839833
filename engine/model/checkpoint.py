"""A checkpoint as the rest of the engine sees it, whatever file format it came in.

Canonical tensor names: `embed`, `norm`, `head`, and per layer `layers.<i>.<part>` with part one of
attn_norm, q, k, v, o, q_bias, k_bias, v_bias, q_norm, k_norm, mlp_norm, gate, up, down.
Matrices are [out, in]; q and k are in the half-split (not interleaved) rotary layout.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from kvpilot.engine.errors import ModelError
from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """`get(canonical name)` reads one tensor (float32 or bfloat16); `load_tokenizer()` builds the tokenizer."""

    path: Path
    config: ModelConfig
    get: Callable[[str], torch.Tensor]
    load_tokenizer: Callable[[], Tokenizer]


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every canonical name this model needs, with its shape."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (hidden,),
        "q": (q, hidden),
        "k": (kv, hidden),
        "v": (kv, hidden),
        "o": (hidden, q),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if config.qkv_bias:
        layer |= {"q_bias": (q,), "k_bias": (kv,), "v_bias": (kv,)}
    if config.qk_norm:
        layer |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab_size, hidden), "norm": (hidden,)}
    if not config.tied_embeddings:
        shapes["head"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        shapes |= {f"layers.{i}.{part}": shape for part, shape in layer.items()}
    return shapes


def check_tensors(
    path: Path,
    config: ModelConfig,
    found: Mapping[str, tuple[int, ...]],
    file_name: Callable[[str], str],
    ignored: Iterable[str] = (),
) -> None:
    """`found`: shape by the file's own names; `file_name` maps canonical names to those.

    Raises ModelError for the first missing, misshapen or unknown tensor: an unknown one means that the
    model computes something that we do not.
    """
    expected = {file_name(name): shape for name, shape in tensor_shapes(config).items()}
    for name, shape in expected.items():
        if name not in found:
            raise ModelError(
                f"{path}: tensor {name} is missing; the file is incomplete or not a {config.architecture} model"
            )
        if found[name] != shape:
            raise ModelError(
                f"{path}: tensor {name} has shape {list(found[name])}, expected {list(shape)} "
                f"from the model's configuration; the checkpoint contradicts itself, fetch it again"
            )
    unknown = sorted(set(found) - set(expected) - set(ignored))
    if unknown:
        raise ModelError(
            f"{path}: tensor {unknown[0]} (and {len(unknown) - 1} more) is not part of a "
            f"{config.architecture} model as this engine knows it; choose a plain Llama, Mistral, Qwen2 or Qwen3"
        )
