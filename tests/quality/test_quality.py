"""The quality benchmark: its measures, its pages, and what a run on a tiny model must show."""

import json

import pytest
import torch

from kvpilot.agent.bench import quality
from kvpilot.agent.bench.command import merge_table
from kvpilot.agent.bench.teacher_forcing import PagedWindows, Recipe
from kvpilot.engine.errors import ConfigError

EXACT = Recipe(name="exact", codec="fp32")


def steps(model, recipe, tokens_WT, page_size=32):
    windows = PagedWindows(
        model, recipe, num_windows=len(tokens_WT), num_pages=tokens_WT.shape[1] // page_size
    )
    logits = [windows.step(tokens) for tokens in tokens_WT.split(page_size, dim=1)]
    rows = torch.stack([step.view(len(tokens_WT), page_size, -1) for step in logits], dim=1)
    return rows.flatten(1, 2), windows


@pytest.fixture
def tokens():
    return torch.randint(0, 128, (3, 160), generator=torch.Generator().manual_seed(7))


def test_kl_is_that_of_the_definition():
    p, q = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    expected = 0.5 * torch.tensor(2.0).log() + 0.25 * torch.tensor(0.5).log()
    assert quality.kl_divergence(p.log(), q.log()).item() == pytest.approx(expected.item())
    assert quality.kl_divergence(p.log(), p.log()).item() == 0


def test_an_exact_cache_page_by_page_is_one_forward_pass(tiny_model, tokens):
    paged, _ = steps(tiny_model, EXACT, tokens)
    whole, _ = steps_of_one_page(tiny_model, tokens)
    torch.testing.assert_close(paged, whole, atol=1e-4, rtol=1e-4)


def steps_of_one_page(model, tokens_WT):
    """The same tokens in one chunk per window, through attention that the paged run does not share."""
    config, rows = model.config, []
    inverse = torch.tensor(config.rope_inverse_frequencies)
    for tokens in tokens_WT:

        def attend(layer, qkv_TX):
            heads = qkv_TX.view(len(qkv_TX), -1, config.head_dim).transpose(0, 1)
            q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
            angles = torch.arange(len(qkv_TX))[:, None] * inverse
            cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

            def rope(x):
                a, b = x.chunk(2, -1)
                return x * cos + torch.cat([-b, a], -1) * sin

            out = torch.nn.functional.scaled_dot_product_attention(
                rope(q)[None], rope(k)[None], v[None], is_causal=True, enable_gqa=True
            )
            return out[0].transpose(0, 1).flatten(1)

        rows.append(model.llama.logits(model.llama.forward(tokens, attend)))
    return torch.stack(rows), None


def test_sealed_pages_are_at_the_level_and_the_tail_at_8_bits(tiny_model, tokens):
    _, windows = steps(tiny_model, Recipe(name="x", codec="int4", tail_tokens=64), tokens)
    for request in windows._requests:
        assert [page.level for page in request.pages] == [1, 2, 2, 1, 1]
    _, windows = steps(tiny_model, Recipe(name="x", codec="int4"), tokens)
    assert [page.level for page in windows._requests[0].pages] == [1, 2, 2, 2, 2]
    windows._pool.check_integrity()


def test_the_first_page_is_exact_while_it_is_open(tiny_model, tokens):
    exact, _ = steps(tiny_model, EXACT, tokens)
    lossy, _ = steps(tiny_model, Recipe(name="x", codec="int4"), tokens)
    assert torch.equal(exact[:, :32], lossy[:, :32])
    assert not torch.equal(exact[:, 32:64], lossy[:, 32:64])


def test_values_written_back_equal_codes_read_by_attention(tiny_model, tokens, monkeypatch):
    """Ingredients are measured on pages written back at full precision: same numbers as real pages give."""
    real, real_windows = steps(tiny_model, Recipe(name="x", codec="int8"), tokens)
    monkeypatch.setattr(Recipe, "is_shipped", property(lambda self: False))
    written, written_windows = steps(tiny_model, Recipe(name="x", codec="int8"), tokens)
    torch.testing.assert_close(real, written, atol=2e-3, rtol=1e-3)
    assert real_windows.relative_bytes() == written_windows.relative_bytes()


def test_a_run_ranks_precisions_by_their_loss(tiny_model):
    seen = []
    report = quality.run(
        tiny_model, quality.SHIPPED, num_windows=9, window_tokens=256, on_progress=seen.append
    )
    rows = {row.recipe: row for row in report.recipes}
    assert seen == sorted(seen)
    assert seen[-1] == 1
    assert rows["int8"].num_scored == 9 * (256 - quality.SKIPPED_TOKENS)
    assert 0 < rows["int8"].kl_mean < rows["fp8"].kl_mean < rows["int4"].kl_mean
    assert rows["int8"].kl_mean < rows["int4, last 128 tokens int8"].kl_mean < rows["int4"].kl_mean
    assert rows["int8"].kl_mean < rows["int8"].kl_p99
    assert rows["int4"].relative_bytes < rows["int4, last 128 tokens int8"].relative_bytes
    assert rows["int8"].relative_bytes == pytest.approx(
        0.5 + 1 / 32
    )  # a 2-byte scale per 32 values of 2 bytes


def test_windows_come_from_prose_and_code_in_turn():
    windows = quality.corpus_windows(lambda text: list(text.encode()), num_windows=8, window_tokens=2048)
    assert windows.shape == (8, 2049)
    assert bytes(windows[0].tolist()).decode().startswith("CHAPTER V")
    assert "Fraction" in bytes(windows[1].tolist()).decode()


def test_refusals_name_value_and_bounds(tiny_model):
    with pytest.raises(ConfigError, match=r"num_windows=17 .* 1 to 16"):
        quality.corpus_windows(lambda text: list(range(4100)), num_windows=17, window_tokens=2048)
    with pytest.raises(ConfigError, match=r"codec='int3' .* int4"):
        Recipe(name="x", codec="int3")


def test_the_table_keeps_other_models(tmp_path):
    path = tmp_path / "quality.json"
    path.write_text(json.dumps({"models": {"other": {"kl_mean": {"int8": 1.0}}}}))
    row = {"perplexity_change_percent": 0.0, "top1_agreement_percent": 0.0, "relative_bytes": 0.5}
    rows = [
        quality.RecipeQuality(recipe=name, codec="int4", kl_mean=kl, kl_p99=kl, num_scored=1, **row)
        for name, kl in (("int4", 0.0041234), ("int4, last 128 tokens int8", 0.001))
    ]
    report = quality.QualityReport(perplexity=1.0, num_windows=1, window_tokens=64, recipes=rows)
    merge_table(path, "smollm2", {"date": "2026-01-01", "command": "x"}, report)
    models = json.loads(path.read_text())["models"]
    assert models["other"] == {"kl_mean": {"int8": 1.0}}
    assert models["smollm2"] == {"date": "2026-01-01", "command": "x", "kl_mean": {"int4": 0.00412}}
