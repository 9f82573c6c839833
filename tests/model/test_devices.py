"""Where a model computes, and weights that are drawn."""

import json

import pytest
import tokenizers
import torch

from kvpilot.engine.config import EngineConfig
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.factory import build_engine
from kvpilot.engine.model.checkpoint import tensor_shapes
from kvpilot.engine.model.load import load_model
from kvpilot.engine.request import SamplingParams


@pytest.fixture
def folder(tmp_path, write_checkpoint):
    """A checkpoint's folder from which the weights were taken away."""
    directory = write_checkpoint(tmp_path / "model", architecture="llama")
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def test_weights_are_drawn_in_the_shape_of_a_config(folder):
    seen = []
    loaded = load_model(
        str(folder),
        torch.float32,
        load_format="dummy",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert loaded.config.num_layers == json.loads((folder / "config.json").read_text())["num_hidden_layers"]
    total = len(tensor_shapes(loaded.config))
    assert seen == [(i, total) for i in range(1, total + 1)]
    engine = build_engine(loaded.llama, EngineConfig(pool_bytes=4 << 20))
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    tokens = [output.token for _ in range(4) for output in engine.step()]
    assert len(tokens) == 4


def test_what_is_drawn_is_the_same_every_time(folder):
    first, second = (load_model(str(folder), torch.float32, load_format="dummy").llama for _ in range(2))
    ids = torch.arange(3)
    assert torch.equal(
        first.forward(ids, lambda layer, qkv: torch.zeros(3, first.config.num_heads * first.config.head_dim)),
        second.forward(
            ids, lambda layer, qkv: torch.zeros(3, first.config.num_heads * first.config.head_dim)
        ),
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_said_with_what_to_do(folder):
    with pytest.raises(ConfigError, match=r"device='cuda' cannot be used: .*device='cpu'"):
        load_model(str(folder), device="cuda")


@pytest.mark.parametrize(("name", "value"), [("device", "tpu"), ("load_format", "pickle")])
def test_unknown_choices_are_refused(folder, name, value):
    with pytest.raises(ConfigError, match=f"{name}='{value}'"):
        load_model(str(folder), **{name: value})
