"""GGUF files: the same tensors as the safetensors they came from, refused with a remedy when broken."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from kvpilot.engine.errors import ModelError
from kvpilot.engine.model.checkpoint import tensor_shapes
from kvpilot.engine.model.config import rope_divisors
from kvpilot.engine.model.gguf_reader import gguf_name, read_gguf
from kvpilot.engine.model.load import read_checkpoint
from kvpilot.engine.model.tokenizer import byte_characters

TOKENS = [*byte_characters().values(), "th", "the", "<|im_start|>", "<|im_end|>"]
TYPES = [1] * 258 + [3, 3]


def interleaved(rows, head_dim):
    """What converters do to q and k of the llama architecture."""
    return rows.reshape(-1, 2, head_dim // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write_gguf(path, checkpoint, *, metadata=None, tensors=None, skip=()):
    config = checkpoint.config
    writer = GGUFWriter(path, config.architecture)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types(TYPES)
    writer.add_token_merges(["t h", "th e"])
    writer.add_eos_token_id(259)
    writer.add_chat_template("{{ messages[0].content }}<|im_end|>")
    for name, value in (metadata or {}).items():
        {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)](name, value)
    data = {}
    for name in tensor_shapes(config):
        values = checkpoint.get(name).numpy()
        if config.architecture == "llama" and name.rpartition(".")[2] in ("q", "k"):
            values = interleaved(values, config.head_dim)
        data[gguf_name(name)] = np.ascontiguousarray(values)
    for name, values in (data | (tensors or {})).items():
        if name not in skip:
            kind = {np.dtype(np.uint8): GGMLQuantizationType.Q8_0}.get(values.dtype)
            writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def source(tmp_path, write_checkpoint):
    directory = tmp_path / "source"
    return read_checkpoint(write_checkpoint(directory, architecture="llama", hidden_size=64))


@pytest.fixture
def path(tmp_path, source):
    return write_gguf(tmp_path / "model.gguf", source)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_holds_what_was_written(tmp_path, write_checkpoint, architecture):
    source = read_checkpoint(write_checkpoint(tmp_path / "source", architecture=architecture))
    found = read_gguf(write_gguf(tmp_path / "model.gguf", source))
    expected = replace(source.config, eos_token_ids=(259,), rms_eps=found.config.rms_eps)
    assert found.config == expected
    assert found.config.rms_eps == pytest.approx(source.config.rms_eps)
    for name in tensor_shapes(found.config):
        assert torch.equal(found.get(name), source.get(name)), name


def test_quantized_tensor_is_dequantized(tmp_path, source):
    exact = source.get("layers.0.gate")
    packed = quantize(exact.numpy(), GGMLQuantizationType.Q8_0)
    found = read_gguf(write_gguf(tmp_path / "q.gguf", source, tensors={"blk.0.ffn_gate.weight": packed}))
    assert not torch.equal(found.get("layers.0.gate"), exact)
    torch.testing.assert_close(found.get("layers.0.gate"), exact, atol=exact.abs().max().item() / 127, rtol=0)


def test_rope_factors_scale_the_frequencies(tmp_path, source):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    found = read_gguf(write_gguf(tmp_path / "r.gguf", source, tensors={"rope_freqs.weight": factors}))
    unscaled = source.config.rope_inverse_frequencies
    expected = [frequency / factor for frequency, factor in zip(unscaled, factors.tolist(), strict=True)]
    assert found.config.rope_inverse_frequencies == pytest.approx(expected)


def test_linear_rope_scaling(tmp_path, source):
    metadata = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    found = read_gguf(write_gguf(tmp_path / "r.gguf", source, metadata=metadata))
    assert found.config.rope_divisors == rope_divisors("linear", {"factor": 4.0}, 1e4, 16)


def test_missing_output_means_tied_embeddings(tmp_path, source):
    assert read_gguf(write_gguf(tmp_path / "t.gguf", source, skip=["output.weight"])).config.tied_embeddings


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.rope.dimension_count": 8}, "rope.dimension_count=8"),
        ({"llama.rope.scaling.type": "yarn"}, "rope scaling 'yarn'"),
    ],
)
def test_metadata_that_we_do_not_compute_is_refused(tmp_path, source, metadata, message):
    with pytest.raises(ModelError, match=message):
        read_gguf(write_gguf(tmp_path / "m.gguf", source, metadata=metadata))


def test_missing_tensor_is_named(tmp_path, source):
    path = write_gguf(tmp_path / "m.gguf", source, skip=["blk.1.ffn_up.weight"])
    with pytest.raises(ModelError, match=r"m\.gguf: tensor blk\.1\.ffn_up\.weight is missing"):
        read_gguf(path)


def test_wrong_shape_names_both_shapes(tmp_path, source):
    wrong = {"blk.0.attn_k.weight": np.zeros((16, 64), np.float32)}
    path = write_gguf(tmp_path / "m.gguf", source, tensors=wrong)
    with pytest.raises(ModelError, match=r"blk\.0\.attn_k\.weight has shape \[16, 64\], expected \[32, 64\]"):
        read_gguf(path)


@pytest.mark.parametrize("keep", [0.001, 0.02, 0.1, 0.5, 0.999])
def test_truncated_file_is_refused(path, keep):
    data = path.read_bytes()
    path.write_bytes(data[: max(8, int(len(data) * keep))])
    with pytest.raises(ModelError, match=r"model\.gguf is truncated or corrupt.*fetch it again"):
        read_gguf(path)


@pytest.mark.parametrize("data", [b"", b"GG", b"\x7fELF" + bytes(100)])
def test_other_files_are_refused(tmp_path, data):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        read_gguf(path)


def test_unreadable_path_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        read_checkpoint(tmp_path / "absent.gguf")


def test_unknown_architecture_is_refused(tmp_path):
    writer = GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelError, match="architecture 'mamba' is not supported"):
        read_gguf(tmp_path / "m.gguf")


def test_tokenizer_comes_with_the_file(path):
    tokenizer = read_gguf(path).load_tokenizer()
    ids = tokenizer.encode("the 12<|im_end|>")
    assert ids == [257, *(TOKENS.index(char) for char in ("\u0120", "1", "2")), 259]
    assert tokenizer.decode(ids) == "the 12"
    assert tokenizer.eos_ids == {259}
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi<|im_end|>"
