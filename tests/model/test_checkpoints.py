"""Directories of safetensors: read in shards, refused with file, tensor and remedy when broken."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvpilot.engine.errors import ModelError
from kvpilot.engine.model.load import read_checkpoint


@pytest.fixture
def directory(tmp_path, write_checkpoint):
    return write_checkpoint(tmp_path / "model", architecture="llama")


def rewrite(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def reconfigure(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_shards_hold_the_same_tensors(tmp_path, write_checkpoint, directory):
    sharded = read_checkpoint(write_checkpoint(tmp_path / "sharded", num_files=3, architecture="llama"))
    single = read_checkpoint(directory)
    assert sharded.config == single.config
    assert torch.equal(sharded.get("layers.1.down"), single.get("layers.1.down"))


def test_missing_shard_is_named(tmp_path, write_checkpoint):
    directory = write_checkpoint(tmp_path / "sharded", num_files=3, architecture="llama")
    (directory / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is missing"):
        read_checkpoint(directory)


def test_missing_tensor_is_named(directory):
    rewrite(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing"):
        read_checkpoint(directory)


def test_wrong_shape_names_both_shapes(directory):
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight has shape \[7\], expected \[48\]"):
        read_checkpoint(directory)


def test_unknown_tensor_is_refused(directory):
    rewrite(
        directory, lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(48)})
    )
    with pytest.raises(ModelError, match=r"o_proj\.bias .*not part of a llama model"):
        read_checkpoint(directory)


def test_integer_weights_are_refused(directory):
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(directory, lambda tensors: tensors.update({name: torch.zeros(80, 48, dtype=torch.int8)}))
    with pytest.raises(ModelError, match="is int8"):
        read_checkpoint(directory).get("layers.0.up")


def test_bfloat16_stays_and_float16_becomes_float32(directory):
    def narrow(tensors):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16()
        tensors["lm_head.weight"] = tensors["lm_head.weight"].half()

    rewrite(directory, narrow)
    checkpoint = read_checkpoint(directory)
    assert checkpoint.get("norm").dtype == torch.bfloat16
    assert checkpoint.get("head").dtype == torch.float32


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.5, 0.999])
def test_truncated_file_is_refused(directory, keep):
    path = directory / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])
    with pytest.raises(ModelError, match=r"model\.safetensors is truncated or corrupt.*fetch it again"):
        read_checkpoint(directory)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
        ({"architectures": []}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor=None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "num_kv_heads=3"),
        ({"hidden_size": None}, "hidden_size=None"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers='two'"),
        ({"vocab_size": 98}, r"expected \[98, 48\]"),
    ],
)
def test_configuration_that_we_do_not_compute_is_refused(directory, changes, message):
    reconfigure(directory, **changes)
    with pytest.raises(ModelError, match=message) as refusal:
        read_checkpoint(directory)
    assert str(directory) in str(refusal.value)


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_broken_json_is_refused(directory, text):
    (directory / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json is not"):
        read_checkpoint(directory)


def test_empty_directory_says_what_is_expected(tmp_path):
    with pytest.raises(ModelError, match="expected a Hugging Face model directory"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "changes", "longest"),
    [
        ("mistral", {"sliding_window": 64}, 64),
        ("mistral", {"sliding_window": None}, 256),
        ("mistral", {"sliding_window": 4096}, 256),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": False}, 256),
        ("qwen2", {"sliding_window": 64, "use_sliding_window": True}, 64),
    ],
)
def test_sliding_window_bounds_the_context(tmp_path, write_checkpoint, architecture, changes, longest):
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, architecture=architecture, **changes))
    assert checkpoint.config.max_position == longest


def test_end_tokens_come_from_both_configurations(directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 2]}))
    assert read_checkpoint(directory).config.eos_token_ids == (7, 2)


def test_tokenizer_is_required_to_load_one(directory):
    with pytest.raises(ModelError, match=r"tokenizer\.json is missing"):
        read_checkpoint(directory).load_tokenizer()
