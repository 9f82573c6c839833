"""Fixtures of the model tests: tiny random checkpoints and a plain float64 decoder to hold Llama against."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from kvpilot.engine.model.checkpoint import Checkpoint, tensor_shapes
from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.fetch import resolve_model
from kvpilot.engine.model.hf_config import model_config
from kvpilot.engine.model.llama import Attend
from kvpilot.engine.model.load import LoadedModel, load_model
from kvpilot.engine.model.safetensors_reader import hugging_face_name


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    return resolve_model("smollm2")


@pytest.fixture(scope="session")
def smollm2_float32(smollm2_path: Path) -> LoadedModel:
    return load_model(str(smollm2_path), torch.float32)


@pytest.fixture
def causal_attention() -> Callable[[ModelConfig], Attend]:
    return _causal_attention


@pytest.fixture
def float64_logits() -> Callable[[Checkpoint, list[int]], Tensor]:
    return _float64_logits


@pytest.fixture
def write_checkpoint() -> Callable[..., Path]:
    return _write_checkpoint


def _causal_attention(config: ModelConfig) -> Attend:
    """The `attend` of one whole sequence, with V and the result in whatever basis they come."""
    inverse = torch.tensor(config.rope_inverse_frequencies, dtype=torch.float64)

    def attend(layer: int, qkv_TX: Tensor) -> Tensor:
        heads_THD = qkv_TX.float().view(len(qkv_TX), -1, config.head_dim).transpose(0, 1)
        q, k, v = heads_THD.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
        return _attention(_rope(q, inverse), _rope(k, inverse), v).to(qkv_TX.dtype)

    return attend


def _rope(x_HTD: Tensor, inverse: Tensor) -> Tensor:
    angles = torch.arange(x_HTD.shape[1], dtype=torch.float64)[:, None] * inverse
    cos, sin = angles.cos().to(x_HTD.dtype), angles.sin().to(x_HTD.dtype)
    a, b = x_HTD.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    repeat = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(repeat, 0), v.repeat_interleave(repeat, 0)
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    future = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return (weights @ v).transpose(0, 1).reshape(q.shape[1], -1)


def _float64_logits(checkpoint: Checkpoint, token_ids: list[int]) -> Tensor:
    """The model written out from the definition: nothing fused, rotated or packed. [T, V]."""
    config = checkpoint.config
    inverse = torch.tensor(config.rope_inverse_frequencies, dtype=torch.float64)

    def get(name: str) -> Tensor:
        return checkpoint.get(name).double()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.rms_eps).sqrt() * weight

    x = get("embed")[token_ids]
    for i in range(config.num_layers):

        def project(part: str, h: Tensor, i: int = i) -> Tensor:
            y = h @ get(f"layers.{i}.{part}").T
            y = y + get(f"layers.{i}.{part}_bias") if config.qkv_bias else y
            y = y.view(len(token_ids), -1, config.head_dim)
            return (
                norm(y, get(f"layers.{i}.{part}_norm")) if config.qk_norm and part != "v" else y
            ).transpose(0, 1)

        h = norm(x, get(f"layers.{i}.attn_norm"))
        q, k = (_rope(project(part, h), inverse) for part in "qk")
        x = x + _attention(q, k, project("v", h)) @ get(f"layers.{i}.o").T
        h = norm(x, get(f"layers.{i}.mlp_norm"))
        gate = torch.nn.functional.silu(h @ get(f"layers.{i}.gate").T)
        x = x + (gate * (h @ get(f"layers.{i}.up").T)) @ get(f"layers.{i}.down").T
    return norm(x, get("norm")) @ get("embed" if config.tied_embeddings else "head").T


def _hf_config(architecture: str, **changes: object) -> dict:
    """A config.json small enough for a test; `architecture` as in ModelConfig."""
    class_name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[architecture]
    config = {
        "architectures": [f"{class_name}ForCausalLM"],
        "model_type": architecture,
        "num_hidden_layers": 2,
        "hidden_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 80,
        "vocab_size": 97,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    return config | changes


def _write_checkpoint(directory: Path, num_files: int = 1, **raw: object) -> Path:
    """A model directory with random weights; `raw` as for `_hf_config`."""
    config = _hf_config(**raw)  # pyright: ignore[reportArgumentType]
    shapes = tensor_shapes(model_config(config, {}, has_qkv_bias=config["model_type"] == "qwen2"))
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, shape in shapes.items():
        scale = 1.0 if len(shape) == 1 or name == "embed" else 1.5 * shape[-1] ** -0.5
        tensors[hugging_face_name(name)] = torch.randn(shape, generator=generator) * scale
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    weight_map = {}
    for n in range(num_files):
        file = "model.safetensors" if num_files == 1 else f"model-{n + 1:05}-of-{num_files:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[n::num_files]}
        save_file(part, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    if num_files > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return directory
