"""A tiny random model that the whole quality benchmark runs on in a second."""

from types import SimpleNamespace

import pytest
import torch

from kvpilot.engine.model.config import ModelConfig
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.model.load import LoadedModel

CONFIG = ModelConfig(
    architecture="llama",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=96,
    vocab_size=128,
    max_position=512,
    tied_embeddings=True,
)


def _weights(name: str) -> torch.Tensor:
    part = name.rpartition(".")[2]
    if part.endswith("norm"):
        return torch.ones(64)
    shapes = {"embed": (128, 64), "q": (128, 64), "k": (64, 64), "v": (64, 64), "o": (64, 128)}
    shapes |= {"gate": (96, 64), "up": (96, 64), "down": (64, 96)}
    generator = torch.Generator().manual_seed(sum(name.encode()))
    return torch.randn(shapes[part], generator=generator) * 2 * shapes[part][-1] ** -0.5


@pytest.fixture(scope="session")
def tiny_model() -> LoadedModel:
    """Byte tokens: ids are the bytes of ASCII text."""
    tokenizer = SimpleNamespace(encode=lambda text: [min(byte, 127) for byte in text.encode()])
    return LoadedModel(config=CONFIG, llama=Llama(CONFIG, _weights, torch.float32), tokenizer=tokenizer)  # pyright: ignore[reportArgumentType]
