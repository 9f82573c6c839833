"""The embedded model: tokens as llama.cpp, distributions as transformers in float32."""

import json
from pathlib import Path

import pytest
import torch

from kvpilot.engine.model.llama import Llama
from kvpilot.engine.model.load import read_checkpoint

pytestmark = pytest.mark.model
HERE = Path(__file__).parent
TOKEN_IDS = json.loads((HERE / "token_ids.json").read_text())  # see make_token_ids.py
LOGPROBS = json.loads((HERE / "logprobs.json").read_text())  # see make_logprobs.py


@pytest.mark.parametrize("text", TOKEN_IDS)
def test_tokens_are_those_of_llama_cpp(smollm2_float32, text):
    tokenizer = smollm2_float32.tokenizer
    ids = tokenizer.encode(text)
    assert ids == TOKEN_IDS[text]
    specials = {0, 1, 2, *range(3, 17)}
    if not specials & set(ids):
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("prompt", LOGPROBS)
def test_greedy_text_and_logprobs_are_those_of_transformers(smollm2_float32, causal_attention, prompt):
    model, steps = smollm2_float32.llama, LOGPROBS[prompt]
    prompt_ids, continuation = TOKEN_IDS[prompt], [step["top"][0] for step in steps]
    hidden = model.forward(torch.tensor(prompt_ids + continuation[:-1]), causal_attention(model.config))
    logprobs = model.logits(hidden[len(prompt_ids) - 1 :]).log_softmax(-1)
    assert logprobs.argmax(-1).tolist() == continuation
    for row, step in zip(logprobs, steps, strict=True):
        assert row[step["top"]].tolist() == pytest.approx(step["logprobs"], abs=5e-4)


def test_bfloat16_is_close_to_float32(smollm2_float32, smollm2_path, causal_attention):
    checkpoint = read_checkpoint(smollm2_path)
    narrow, exact = Llama(checkpoint.config, checkpoint.get, torch.bfloat16), smollm2_float32.llama
    divergences = []
    for prompt, steps in LOGPROBS.items():
        ids = torch.tensor(TOKEN_IDS[prompt] + [step["top"][0] for step in steps])
        logprobs = [
            model.logits(model.forward(ids, causal_attention(model.config))).log_softmax(-1)
            for model in (exact, narrow)
        ]
        divergences.append((logprobs[0].exp() * (logprobs[0] - logprobs[1])).sum(-1))
    assert torch.cat(divergences).mean() < 2e-3


def test_configuration(smollm2_float32):
    config, tokenizer = smollm2_float32.config, smollm2_float32.tokenizer
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (30, 9, 3, 64)
    assert config.tied_embeddings
    assert config.max_position == 8192
    assert tokenizer.vocab_size == config.vocab_size == 49152
    assert tokenizer.eos_ids == {0, 2}


def test_chat_template(smollm2_float32):
    text = smollm2_float32.tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
