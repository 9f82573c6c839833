"""What a precision of the KV cache costs: `autotune bench quality`.

Teacher forcing over shipped prose and code, in fp32 compute and through the engine's attention. Every sealed page
is at the precision under test, the open page is exact, and the reference is the same run with an exact cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from rich.table import Table
from torch import Tensor

from kvpilot.agent.bench.corpus import read_texts
from kvpilot.agent.bench.teacher_forcing import EXACT, PagedWindows, Recipe
from kvpilot.engine.errors import ConfigError
from kvpilot.engine.model.load import LoadedModel

WINDOW_TOKENS = 2048
SKIPPED_TOKENS = 64  # of a window: the first tokens see no page at the lowest level, only the sink
WINDOWS_AT_ONCE = 8

SHIPPED = (
    Recipe(name="int8", codec="int8"),
    Recipe(name="fp8", codec="fp8"),
    Recipe(name="int4", codec="int4"),
    Recipe(name="int4, last 128 tokens int8", codec="int4", tail_tokens=128),
)
INGREDIENTS = (
    Recipe(name="int8 without rotation", codec="int8", is_rotated=False),
    Recipe(name="int4 without rotation", codec="int4", is_rotated=False),
    Recipe(name="int4, sink page int4 too", codec="int4", protects_sink=False),
)


@dataclass(frozen=True, kw_only=True)
class RecipeQuality:
    """Losses of one recipe against an exact cache. KL in nats per token, exact distribution first."""

    recipe: str
    codec: str
    kl_mean: float
    kl_p99: float
    perplexity_change_percent: float
    top1_agreement_percent: float
    relative_bytes: float  # of sealed pages at the end of a window, scales included; bf16 is 1
    num_scored: int


@dataclass(frozen=True, kw_only=True)
class QualityReport:
    perplexity: float  # of the exact cache
    num_windows: int
    window_tokens: int
    recipes: list[RecipeQuality]

    def as_dict(self) -> dict:
        return asdict(self)


class _Scores:
    """Per-token losses of one recipe, collected over steps."""

    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.nll: list[Tensor] = []
        self.agrees: list[Tensor] = []

    def add(self, exact_logp_NV: Tensor, logp_NV: Tensor, targets_N: Tensor) -> None:
        self.kl.append(kl_divergence(exact_logp_NV, logp_NV))
        self.nll.append(-logp_NV.gather(1, targets_N[:, None])[:, 0])
        self.agrees.append(exact_logp_NV.argmax(-1) == logp_NV.argmax(-1))


def kl_divergence(logp_NV: Tensor, logq_NV: Tensor) -> Tensor:
    """KL(p || q) in nats per row, float64 [N]; both arguments are normalised log-probabilities."""
    return (logp_NV.exp() * (logp_NV - logq_NV)).sum(-1, dtype=torch.float64)


def corpus_windows(encode: Callable[[str], list[int]], num_windows: int, window_tokens: int) -> Tensor:
    """int64 [num_windows, window_tokens + 1], prose and code in turn; windows of a text overlap by one token."""
    per_text: list[list[list[int]]] = []
    for text in read_texts().values():
        tokens = encode(text)
        starts = range(0, len(tokens) - window_tokens, window_tokens)
        per_text.append([tokens[i : i + window_tokens + 1] for i in starts])
    rounds = max(map(len, per_text))
    windows = [some[i] for i in range(rounds) for some in per_text if i < len(some)]
    if not 1 <= num_windows <= len(windows):
        raise ConfigError(
            f"num_windows={num_windows} is invalid: expected 1 to {len(windows)} of {window_tokens} tokens"
        )
    return torch.tensor(windows[:num_windows])


def run(
    model: LoadedModel,
    recipes: Sequence[Recipe] = (*SHIPPED, *INGREDIENTS),
    *,
    num_windows: int = 16,
    window_tokens: int = WINDOW_TOKENS,
    on_progress: Callable[[float], None] = lambda share: None,
) -> QualityReport:
    """Scores `recipes` on the corpus; `on_progress` gets the share done, 0 to 1. The model must be in float32."""
    if model.llama.dtype != torch.float32:
        raise ConfigError(
            f"dtype={model.llama.dtype} is invalid: expected torch.float32, since rounding to bf16 alone costs more "
            "than int8 pages do"
        )
    windows = corpus_windows(model.tokenizer.encode, num_windows, window_tokens)
    exact, scores = _Scores(), [_Scores() for _ in recipes]
    relative_bytes = [0.0] * len(recipes)
    groups = windows.split(WINDOWS_AT_ONCE)
    for done, group in enumerate(groups):

        def advance(share: float, done: int = done) -> None:
            on_progress((done + share) / len(groups))

        relative_bytes = _score_group(model, recipes, group, exact, scores, advance)
    exact_nll = torch.cat(exact.nll).double().mean()
    return QualityReport(
        perplexity=exact_nll.exp().item(),
        num_windows=num_windows,
        window_tokens=window_tokens,
        recipes=[
            _summarise(recipe, score, exact_nll.item(), size)
            for recipe, score, size in zip(recipes, scores, relative_bytes, strict=True)
        ],
    )


def _score_group(
    model: LoadedModel,
    recipes: Sequence[Recipe],
    tokens_WT: Tensor,
    exact: _Scores,
    scores: list[_Scores],
    on_progress: Callable[[float], None],
) -> list[float]:
    """Adds the losses of these windows to `scores`; the relative bytes per recipe."""
    num_windows, window_tokens = tokens_WT.shape[0], tokens_WT.shape[1] - 1

    def paged(recipe: Recipe) -> PagedWindows:
        return PagedWindows(model, recipe, num_windows=num_windows, num_pages=num_pages)

    page_size = 32
    num_pages = window_tokens // page_size
    reference = paged(Recipe(name="exact", codec=EXACT))
    runs = [paged(recipe) for recipe in recipes]
    for page in range(num_pages):
        begin = page * page_size
        inputs = tokens_WT[:, begin : begin + page_size]
        targets = tokens_WT[:, begin + 1 : begin + page_size + 1].flatten()
        exact_logp = reference.step(inputs).log_softmax(-1)
        is_scored = begin >= SKIPPED_TOKENS
        if is_scored:
            exact.add(exact_logp, exact_logp, targets)
        for run_, score in zip(runs, scores, strict=True):
            logits = run_.step(inputs)
            if is_scored:
                score.add(exact_logp, logits.log_softmax(-1), targets)
        on_progress((page + 1) / num_pages)
    return [run_.relative_bytes() for run_ in runs]


def _summarise(recipe: Recipe, score: _Scores, exact_nll: float, relative_bytes: float) -> RecipeQuality:
    kl = torch.cat(score.kl)
    nll = torch.cat(score.nll).double().mean().item()
    return RecipeQuality(
        recipe=recipe.name,
        codec=recipe.codec,
        kl_mean=kl.mean().item(),
        kl_p99=kl.quantile(0.99).item(),
        perplexity_change_percent=100 * torch.tensor(nll - exact_nll).expm1().item(),
        top1_agreement_percent=100 * torch.cat(score.agrees).float().mean().item(),
        relative_bytes=relative_bytes,
        num_scored=len(kl),
    )


def table(report: QualityReport) -> Table:
    """The report for a terminal."""
    scored = report.recipes[0].num_scored if report.recipes else 0
    result = Table(
        title=f"{scored} tokens scored in {report.num_windows} windows of {report.window_tokens}; "
        f"perplexity with an exact cache {report.perplexity:.3f}"
    )
    for heading in ("recipe", "bytes", "KL mean", "KL p99", "ppl %", "top-1 %"):
        result.add_column(heading, justify="left" if heading == "recipe" else "right")
    for row in report.recipes:
        result.add_row(
            row.recipe,
            f"{row.relative_bytes:.3f}",
            f"{row.kl_mean:.5f}",
            f"{row.kl_p99:.4f}",
            f"{row.perplexity_change_percent:+.2f}",
            f"{row.top1_agreement_percent:.1f}",
        )
    return result
