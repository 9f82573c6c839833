"""The fused, rotated, packed decoder against the definition written out in float64, and against transformers.

GOLDEN holds the first four logits of the last token, by transformers 5.24 on the directories that
`write_checkpoint` makes (float32, eager):
    AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(torch.tensor([TOKENS])).logits[0, -1, :4]
"""

import pytest
import torch

from kvpilot.engine.kv.codecs.rotation import hadamard
from kvpilot.engine.model.llama import Llama
from kvpilot.engine.model.load import read_checkpoint

TOKENS = [5, 17, 96, 0, 33, 33, 2, 61, 8, 44, 70, 21]
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "llama": {"architecture": "llama"},
    "llama-tied": {"architecture": "llama", "tie_word_embeddings": True},
    "llama-llama3-rope": {"architecture": "llama", "rope_scaling": LLAMA3},
    "llama-linear-rope": {"architecture": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "llama-odd-heads": {"architecture": "llama", "head_dim": 24},
    "mistral": {"architecture": "mistral", "sliding_window": None},
    "qwen2": {"architecture": "qwen2"},
    "qwen3": {"architecture": "qwen3"},
}
GOLDEN = {
    "llama": [-2.1569, 1.1494, 0.1932, 0.5543],
    "llama-tied": [-5.6226, 8.2808, -1.8544, 0.354],
    "llama-llama3-rope": [-0.6264, -0.5923, 0.8083, 1.8178],
    "llama-linear-rope": [-0.8716, 0.689, -0.6636, 0.3029],
    "llama-odd-heads": [-2.2534, -0.5919, 0.62, 0.7921],
    "mistral": [-2.1569, 1.1494, 0.1932, 0.5543],
    "qwen2": [-1.2698, 0.8968, 0.2959, -0.5844],
    "qwen3": [0.3085, 0.187, -0.4399, 1.8108],
}


@pytest.fixture(params=MODELS)
def checkpoint(request, tmp_path, write_checkpoint):
    return read_checkpoint(write_checkpoint(tmp_path / request.param, **MODELS[request.param]))


def centered(logits):
    return logits - logits.mean(-1, keepdim=True)


def test_float32_computes_the_definition(checkpoint, causal_attention, float64_logits):
    model = Llama(checkpoint.config, checkpoint.get, torch.float32)
    hidden = model.forward(torch.tensor(TOKENS), causal_attention(checkpoint.config))
    expected = centered(float64_logits(checkpoint, TOKENS))
    torch.testing.assert_close(model.logits(hidden).double(), expected, atol=2e-4, rtol=1e-4)


def test_the_definition_is_that_of_transformers(checkpoint, float64_logits):
    expected = torch.tensor(GOLDEN[checkpoint.path.name], dtype=torch.float64)
    torch.testing.assert_close(float64_logits(checkpoint, TOKENS)[-1, :4], expected, atol=2e-4, rtol=1e-4)


def test_bfloat16_stays_close(checkpoint, causal_attention, float64_logits):
    model = Llama(checkpoint.config, checkpoint.get, torch.bfloat16)
    hidden = model.forward(torch.tensor(TOKENS), causal_attention(checkpoint.config))
    exact = float64_logits(checkpoint, TOKENS).log_softmax(-1)
    kl = (exact.exp() * (exact - model.logits(hidden).double().log_softmax(-1))).sum(-1)
    assert hidden.dtype == torch.float32
    assert kl.mean() < 2e-3


def test_logits_of_a_row_do_not_depend_on_the_others(tmp_path, write_checkpoint, causal_attention):
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, architecture="llama"))
    model = Llama(checkpoint.config, checkpoint.get, torch.float32)
    hidden = model.forward(torch.tensor(TOKENS), causal_attention(checkpoint.config))
    torch.testing.assert_close(model.logits(hidden[[3, 7]]), model.logits(hidden)[[3, 7]])


def test_attend_gets_q_k_and_rotated_v(tmp_path, write_checkpoint):
    checkpoint = read_checkpoint(write_checkpoint(tmp_path, architecture="qwen2"))
    config = checkpoint.config
    seen = []

    def attend(layer, qkv_TX):
        seen.append(qkv_TX.clone())
        return qkv_TX[:, : config.num_heads * config.head_dim]

    Llama(config, checkpoint.get, torch.float32).forward(torch.tensor(TOKENS), attend)
    x = checkpoint.get("embed")[TOKENS]
    x = (
        x
        * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_eps)
        * checkpoint.get("layers.0.attn_norm")
    )
    q, k, v = (x @ checkpoint.get(f"layers.0.{p}").T + checkpoint.get(f"layers.0.{p}_bias") for p in "qkv")
    rotation = hadamard(config.head_dim)
    assert rotation is not None
    v = (v.view(len(TOKENS), -1, config.head_dim) @ rotation).flatten(1)
    assert len(seen) == config.num_layers
    torch.testing.assert_close(seen[0], torch.cat([q, k, v], -1), atol=1e-4, rtol=1e-4)
