"""Reads a checkpoint from a GGUF file."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize

from kvpilot.engine.errors import ModelError
from kvpilot.engine.model.checkpoint import Checkpoint, check_tensors
from kvpilot.engine.model.config import ModelConfig, rope_divisors
from kvpilot.engine.model.gguf_tokenizer import gguf_tokenizer
from kvpilot.engine.model.tokenizer import Tokenizer

ROPE_FACTORS = "rope_freqs.weight"  # divisors of the inverse frequencies (Llama 3.1)
_TOP = {"embed": "token_embd", "norm": "output_norm", "head": "output"}
_LAYER = {
    "attn_norm": "attn_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "o": "attn_output.weight",
    **{part: f"attn_{part}.weight" for part in ("q", "k", "v", "q_norm", "k_norm")},
    **{f"{part}_bias": f"attn_{part}.bias" for part in ("q", "k", "v")},
    **{part: f"ffn_{part}.weight" for part in ("gate", "up", "down")},
}


class _Reader(GGUFReader):
    """Parses plain views of the mapped file: slicing np.memmap itself takes three times as long."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, np.asarray(value) if name == "data" else value)


def read_gguf(path: Path) -> Checkpoint:
    """ModelError if the file is not a complete GGUF of a supported model."""
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: its first bytes are not 'GGUF'; fetch it again")
    try:
        reader = _Reader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:  # what slicing a short file raises
        size = path.stat().st_size
        raise ModelError(
            f"{path} is truncated or corrupt ({size} bytes): {error}; delete it and fetch it again"
        ) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    try:
        config = _config(metadata, tensors)
        shapes = {name: _shape(tensor) for name, tensor in tensors.items()}
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    check_tensors(path, config, shapes, gguf_name, ignored=(ROPE_FACTORS,))

    def get(name: str) -> torch.Tensor:
        tensor = torch.from_numpy(_values(path, tensors[gguf_name(name)]))
        part = name.rpartition(".")[2]
        if config.architecture == "llama" and part in ("q", "k", "q_bias", "k_bias"):
            return _half_split(tensor, config.head_dim)
        return tensor

    def load_tokenizer() -> Tokenizer:
        try:
            return gguf_tokenizer(metadata)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from error

    return Checkpoint(path=path, config=config, get=get, load_tokenizer=load_tokenizer)


def _shape(tensor: ReaderTensor) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def gguf_name(name: str) -> str:
    """A canonical tensor name as GGUF spells it."""
    if name in _TOP:
        return f"{_TOP[name]}.weight"
    _, layer, part = name.split(".")
    return f"blk.{layer}.{_LAYER[part]}"


def _values(path: Path, tensor: ReaderTensor) -> np.ndarray:
    try:
        values = dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ModelError(
            f"{path}: tensor {tensor.name} is quantized as {kind}, which is not supported"
        ) from error
    return np.array(values, dtype=np.float32).reshape(_shape(tensor))  # a copy: the file is mapped read-only


def _half_split(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undoes the interleaving of rotary pairs that GGUF applies to q and k of the llama architecture."""
    pairs = rows.reshape(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


def _config(metadata: dict[str, Any], tensors: dict[str, ReaderTensor]) -> ModelConfig:
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise ModelError(f"architecture {architecture!r} is not supported: expected llama, qwen2 or qwen3")
    if "token_embd.weight" not in tensors:
        raise ModelError("tensor token_embd.weight is missing; the file is incomplete, fetch it again")
    value = partial(_number, metadata)
    num_heads, hidden = value("attention.head_count"), value("embedding_length")
    head_dim = value("attention.key_length", hidden // num_heads)
    _check_layers(metadata, head_dim)
    theta = value("rope.freq_base", 10_000.0)
    max_position = value("context_length")
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return ModelConfig(
        architecture=architecture,
        num_layers=value("block_count"),
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=value("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        intermediate_size=value("feed_forward_length"),
        vocab_size=_shape(tensors["token_embd.weight"])[0],
        max_position=min(max_position, value("attention.sliding_window", 0) or max_position),
        rope_theta=theta,
        rope_divisors=_divisors(metadata, tensors, theta, head_dim),
        rms_eps=value("attention.layer_norm_rms_epsilon"),
        tied_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(i for i in ends if i is not None)),
    )


def _number(metadata: dict[str, Any], name: str, default: Any = None) -> Any:
    """A number of this architecture; ModelError if there is none, or one for each layer."""
    architecture = metadata["general.architecture"]
    found = metadata.get(f"{architecture}.{name}", default)
    if found is None:
        raise ModelError(f"{architecture}.{name} is missing from the metadata; fetch the file again")
    if not isinstance(found, int | float):
        raise ModelError(
            f"{architecture}.{name}={found!r} is not supported: expected one number for all layers"
        )
    return found


def _check_layers(metadata: dict[str, Any], head_dim: int) -> None:
    """Raise ModelError for experts, and for heads whose parts differ in size."""
    architecture = metadata["general.architecture"]
    if experts := _number(metadata, "expert_count", 0):
        raise ModelError(
            f"{architecture}.expert_count={experts}: mixtures of experts are not supported; choose a dense model"
        )
    for name in ("rope.dimension_count", "attention.value_length"):
        if (found := _number(metadata, name, head_dim)) != head_dim:
            raise ModelError(
                f"{architecture}.{name}={found} is not supported: expected {head_dim}, as the heads"
            )


def _divisors(
    metadata: dict[str, Any], tensors: dict[str, ReaderTensor], theta: float, head_dim: int
) -> tuple[float, ...]:
    if ROPE_FACTORS in tensors:
        return tuple(float(factor) for factor in tensors[ROPE_FACTORS].data)
    prefix = f"{metadata['general.architecture']}.rope.scaling"
    kind = metadata.get(f"{prefix}.type", "none")
    return rope_divisors(kind, {"factor": metadata.get(f"{prefix}.factor")}, theta, head_dim)
