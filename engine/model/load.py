"""From a model's name to everything needed to run it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kvpilot.engine.errors import ConfigError, ModelError
from kvpilot.engine.model.checkpoint import Checkpoint, tensor_shapes
from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.device import make_llama, usable_device
from kvpilot.engine.model.dummy import random_weights
from kvpilot.engine.model.fetch import resolve_model
from kvpilot.engine.model.gguf_reader import read_gguf
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.model.safetensors_reader import read_safetensors
from kvpilot.engine.model.tokenizer import Tokenizer

LOAD_FORMATS = ("auto", "dummy")

Progress = Callable[[int, int], None]
"""Called with the number of tensors read so far and of all."""


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    config: ModelConfig
    llama: Llama
    tokenizer: Tokenizer


def read_checkpoint(path: Path, *, has_weights: bool = True) -> Checkpoint:
    """A GGUF file or a directory of safetensors; ModelError if it is neither or not supported.

    Without weights a directory needs no more than config.json and tokenizer.json.
    """
    try:
        return read_safetensors(path, has_weights=has_weights) if path.is_dir() else read_gguf(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def load_model(
    spec: str,
    dtype: torch.dtype | None = None,
    *,
    device: str = "cpu",
    load_format: str = "auto",
    progress: Progress | None = None,
) -> LoadedModel:
    """`spec` as for `resolve_model`; `dtype` is bfloat16, float32 or None for what the device is best at.

    `load_format="dummy"` draws random weights in the model's shape. ConfigError if the device cannot be used.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format={load_format!r} is invalid: expected {' or '.join(LOAD_FORMATS)}")
    target = usable_device(device)
    is_dummy = load_format == "dummy"
    checkpoint = read_checkpoint(resolve_model(spec), has_weights=not is_dummy)
    get = random_weights(checkpoint.config, target) if is_dummy else _to(checkpoint.get, target)
    if progress is not None:
        get = _counted(get, len(tensor_shapes(checkpoint.config)), progress)
    return LoadedModel(
        config=checkpoint.config,
        llama=make_llama(checkpoint.config, get, dtype, target),
        tokenizer=checkpoint.load_tokenizer(),
    )


def _to(get: Callable[[str], Tensor], device: torch.device) -> Callable[[str], Tensor]:
    return get if device.type == "cpu" else lambda name: get(name).to(device)


def _counted(get: Callable[[str], Tensor], total: int, progress: Progress) -> Callable[[str], Tensor]:
    count = 0

    def counted(name: str) -> Tensor:
        nonlocal count
        tensor = get(name)
        count += 1
        progress(count, total)
        return tensor

    return counted
