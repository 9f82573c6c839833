"""Traffic like that which the statistics tell of: drawn, not recorded. What it gives is an estimate.

Sessions whose turns repeat all that went before: their number of turns is geometric, each turn comes an idle time after
the one before. The idle times are those of pages that were hit; pages that were released while idle count as not hit
*so far* (a life table). Hits on pages that somebody was using have no idle time: they stand for a preamble that all
share.
"""

import heapq
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpilot.env.traces.blocks import Floats, offsets_of
from kvpilot.env.traces.servegen import RateCurve
from kvpilot.env.traces.trace import Trace

BURN_IN = 3.0  # spans before the trace begins, so that it begins amid sessions
LEAST_SPREAD = 0.2  # coefficient of variation of what a turn adds
MAX_SPREAD = 3.0
LONGEST_IDLE = 2.0  # spans: nothing is said of longer pauses
ENOUGH = 0.05  # of all pages, still idle: below it a bin tells nothing
OCTAVES = 2.0  # of idle time, whose rate of hits goes on beyond what pages lived


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Log-normal, at least one token."""

    mean: float
    cv: float

    def draw(self, num: int, rng: np.random.Generator) -> np.ndarray:
        sigma = math.sqrt(math.log1p(self.cv**2))
        drawn = rng.lognormal(math.log(self.mean) - sigma**2 / 2, sigma, num)
        return np.maximum(np.rint(drawn), 1).astype(np.int64)


class IdleTimes:
    """How long a session's pages lie idle before its next turn, of those turns that come."""

    def __init__(self, edges: Floats, weights: Floats) -> None:
        self.edges, self._cumulative = edges, np.cumsum(weights) / weights.sum()

    def draw(self, num: int, rng: np.random.Generator) -> Floats:
        """Seconds; log-uniform within a bin."""
        bins = np.searchsorted(self._cumulative, rng.uniform(size=num), side="right")
        bins = np.minimum(bins, len(self.edges) - 2)
        low, high = np.log(self.edges[bins]), np.log(self.edges[bins + 1])
        return np.exp(rng.uniform(low, high))


def idle_times(statistics: Mapping[str, Any], span: float) -> tuple[IdleTimes, float]:
    """And the share of idle pages that would be hit in the end, if none were released.

    The actuarial estimate (Cutler and Ederer, 1958): who is released in a bin was at risk for half of it.
    """
    reused = np.array(statistics["reused"], dtype=float)
    released = np.array(statistics["released"], dtype=float)
    bounds = np.array(statistics["idle_bounds"], dtype=float)
    edges = np.concatenate([[bounds[0] / 2], bounds, [2 * bounds[-1]]])
    later = np.cumsum((reused + released)[::-1])[::-1] + statistics["more_idle_pages"]
    at_risk = later - released / 2
    hazard = np.divide(reused, at_risk, out=np.zeros_like(reused), where=at_risk > 0)
    hazard = _extended(hazard, at_risk, edges, LONGEST_IDLE * span)
    alive = np.concatenate([[1.0], np.cumprod(1 - np.minimum(hazard, 1.0))])
    weights = -np.diff(alive)
    if weights.sum() <= 0:  # nothing was ever hit: how long it would have taken is not known
        weights = np.where(edges[1:] <= span, 1.0, 0.0)
        return IdleTimes(edges, weights), 0.0
    return IdleTimes(edges, weights), float(weights.sum())


def _extended(hazard: Floats, at_risk: Floats, edges: Floats, longest: float) -> Floats:
    """Behind the last bin in which enough pages were still idle, the rate of the octaves before goes on."""
    last = int(np.flatnonzero(at_risk >= ENOUGH * at_risk[0])[-1])
    octaves = np.log2(edges[1:] / edges[:-1])
    first = int(np.searchsorted(edges, edges[last + 1] / 2.0**OCTAVES, side="left"))
    seen = slice(min(first, last), last + 1)
    rate = float((hazard * at_risk)[seen].sum() / (octaves * at_risk)[seen].sum())
    extended = hazard.copy()
    for k in range(last + 1, len(hazard)):
        extended[k] = -math.expm1(-rate * octaves[k]) if edges[k] < longest else 0.0
    return extended


def preamble_tokens(statistics: Mapping[str, Any], page_size: int) -> int:
    """Whole pages of it. Shared pages are hardly ever idle, whatever the knobs."""
    requests = sum(count for _, count in statistics["arrivals"])
    idle_hits = page_size * sum(statistics["reused"]) / max(requests, 1.0)
    shared = min(max(statistics["hit_tokens"] - idle_hits, 0.0), 0.9 * statistics["prompt_tokens"]["mean"])
    return int(shared) // page_size * page_size


def continued_share(statistics: Mapping[str, Any]) -> float:
    """Of requests that continue another one: the share of idle pages that come to be hit, within what the lengths
    allow, as every turn repeats the prompt and the answer before."""
    span = sum(seconds for seconds, _ in statistics["arrivals"])
    prompt, output = statistics["prompt_tokens"]["mean"], statistics["output_tokens"]["mean"]
    return min(idle_times(statistics, span)[1], 0.99 * prompt / (prompt + output))


def draw_traffic(
    statistics: Mapping[str, Any],
    *,
    page_size: int,
    max_tokens: int,
    warm_up: float,
    seed: int = 0,
) -> Trace:
    """`warm_up` spans at the mean rate, then the span that was seen with its rates. The arrivals are a Poisson process
    of the rates; one that finds a session's next turn due is that turn, the others begin sessions."""
    rng = np.random.default_rng(seed)
    spans = np.array(statistics["arrivals"], dtype=float)
    span = float(spans[:, 0].sum())
    start = (warm_up + BURN_IN) * span
    arrivals = _arrivals(spans, start, rng)
    num = len(arrivals)
    continued, shared = continued_share(statistics), preamble_tokens(statistics, page_size)
    output = statistics["output_tokens"]
    added = _added(statistics, shared, continued).draw(num, rng)
    answers = Lengths(mean=max(output["mean"], 1.0), cv=min(output["cv"], MAX_SPREAD)).draw(num, rng)
    idle = idle_times(statistics, span)[0].draw(num, rng)
    goes_on = rng.uniform(size=num) < continued
    pauses = idle + statistics["service_seconds"]
    counts = arrivals >= start
    bounded = (answers, pauses, goes_on, max_tokens - shared)
    _, _, prompts = _sessions(arrivals, added, *bounded)
    wanted = statistics["prompt_tokens"]["mean"] - shared
    # once more with what brings the mean to what was seen: few long prompts decide it
    added = np.maximum(np.rint(added * wanted / prompts[counts].mean()), 1).astype(np.int64)
    session, turn, prompts = _sessions(arrivals, added, *bounded)
    prompts = prompts + shared
    kept = np.flatnonzero((arrivals >= start - warm_up * span) & (prompts + answers < max_tokens))
    pages = prompts[kept] // page_size
    return Trace(
        arrival_seconds=arrivals[kept] - (start - warm_up * span),
        prompt_tokens=prompts[kept],
        output_tokens=answers[kept],
        block_ids=_block_ids(session[kept], pages, shared // page_size),
        block_offsets=offsets_of(pages),
        block_size=page_size,
        session=session[kept],
        turn=turn[kept],
        tenant=np.zeros(len(kept), dtype=np.int64),
        provenance=({"step": "drawn from statistics", "continued": continued, "seed": seed},),
    )


def _added(statistics: Mapping[str, Any], shared: int, continued: float) -> Lengths:
    """What each turn adds to the prompt. Their number is geometric: with n turns of variance v, and n itself varying,
    the square of the prompt's coefficient of variation is (1 - continued) v + continued."""
    prompt, output = statistics["prompt_tokens"], statistics["output_tokens"]["mean"]
    own = prompt["mean"] - shared
    square = ((prompt["cv"] * prompt["mean"] / own) ** 2 - continued) / (1 - continued)
    spread = min(max(math.sqrt(max(square, 0.0)), LEAST_SPREAD), MAX_SPREAD)
    return Lengths(mean=max(own * (1 - continued) - continued * output, 1.0), cv=spread)


def _block_ids(session: np.ndarray, pages: np.ndarray, shared: int) -> np.ndarray:
    """The first `shared` pages are everybody's, the others the session's."""
    longest = int(pages.max(initial=0)) + 1
    blocks = []
    for one, num in zip(session.tolist(), pages.tolist(), strict=True):
        ids = np.arange(num)
        ids[shared:] += (one + 1) * longest
        blocks.append(ids)
    return np.concatenate(blocks) if blocks else np.empty(0, dtype=np.int64)


def _arrivals(spans: Floats, start: float, rng: np.random.Generator) -> Floats:
    """Sorted seconds: `start` seconds at the mean rate, then the rates of the spans."""
    seconds, counts = spans[:, 0], spans[:, 1]
    mean = counts.sum() / seconds.sum()
    starts = np.concatenate([[0.0], start + np.concatenate([[0.0], np.cumsum(seconds)[:-1]])])
    curve = RateCurve(
        start_seconds=starts,
        rates=np.concatenate([[mean], counts / seconds]),
        end_seconds=start + float(seconds.sum()),
        name="as seen",
    )
    return curve.draw_times(round(mean * start + counts.sum()), rng)


def _sessions(
    arrivals: Floats,
    added: np.ndarray,
    answers: np.ndarray,
    pauses: Floats,
    goes_on: np.ndarray,
    max_tokens: int,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """i8[N] each: session, turn and prompt tokens of every arrival."""
    num = len(arrivals)
    session, turn = np.arange(num), np.ones(num, dtype=np.int64)
    prompts = added.copy()
    due: list[tuple[float, int]] = []  # when the next turn of a session comes, and the arrival it continues
    for k, now in enumerate(arrivals.tolist()):
        if due and due[0][0] <= now:
            _, before = heapq.heappop(due)
            session[k], turn[k] = session[before], turn[before] + 1
            prompts[k] = prompts[before] + answers[before] + added[k]
        if goes_on[k] and prompts[k] + answers[k] < max_tokens:
            heapq.heappush(due, (now + pauses[k], k))
    return session, turn, prompts
