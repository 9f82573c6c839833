"""From a model's name to everything needed to run it."""

from dataclasses import dataclass
from pathlib import Path

import torch

from kvpilot.engine.errors import ModelError
from kvpilot.engine.model.checkpoint import Checkpoint
from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.fetch import resolve_model
from kvpilot.engine.model.gguf_reader import read_gguf
from kvpilot.engine.model.llama import Llama, default_dtype
from kvpilot.engine.model.safetensors_reader import read_safetensors
from kvpilot.engine.model.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class LoadedModel:
    config: ModelConfig
    llama: Llama
    tokenizer: Tokenizer


def read_checkpoint(path: Path) -> Checkpoint:
    """A GGUF file or a directory of safetensors; ModelError if it is neither or not supported."""
    try:
        return read_safetensors(path) if path.is_dir() else read_gguf(path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


def load_model(spec: str, dtype: torch.dtype | None = None) -> LoadedModel:
    """`spec` as for `resolve_model`; `dtype` is bfloat16, float32 or None for what this CPU is best at."""
    checkpoint = read_checkpoint(resolve_model(spec))
    return LoadedModel(
        config=checkpoint.config,
        llama=Llama(checkpoint.config, checkpoint.get, dtype or default_dtype()),
        tokenizer=checkpoint.load_tokenizer(),
    )
