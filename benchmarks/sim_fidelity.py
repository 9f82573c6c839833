"""The simulator against the engine: the same traffic through both, figure by figure.

    benchmarks/sim_fidelity.py [--profile cpu-smollm2] [--seconds 180] [--plot docs/sim_fidelity.svg]

Seeded multi-turn chats arrive in open loop at a low, a medium and a too high rate. The engine runs them in this
process, in real time, with the embedded model; the simulator runs them with a profile that `autotune calibrate`
made on this machine. The model's replies are replaced by the chats' own, so that the next turn finds them cached in
both. Nothing else may run meanwhile, and nothing did when the profile was made.
"""

# pyright: reportMissingImports=false
import argparse
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.engine import Engine
from kvpilot.engine.errors import EngineFullError, RequestError
from kvpilot.engine.factory import build_engine
from kvpilot.engine.kv.formats import PageShape
from kvpilot.engine.kv.storage import PageStorage
from kvpilot.engine.model.load import LoadedModel, load_model
from kvpilot.engine.request import SampledToken, SamplingParams, ScheduledRequest
from kvpilot.engine.runners.base import Runner
from kvpilot.env.replay.result import REQUEST_COLUMNS
from kvpilot.env.replay.sim import SimReplay, replay_simulated, request_row
from kvpilot.env.replay.summary import summarize
from kvpilot.env.replay.synthetic import SyntheticText
from kvpilot.env.simulator.latency import LatencyProfile, load_profile
from kvpilot.env.slo import Slo
from kvpilot.env.traces.blocks import offsets_of
from kvpilot.env.traces.trace import Trace

PAGE_TOKENS = 32
SYSTEM_BLOCKS, NUM_SYSTEMS = 3, 4  # chats share one of a few system prompts
SESSIONS_PER_SECOND = {"low": 0.2, "medium": 0.6, "overload": 2.0}
# of a calibrated profile, on steps held out: what a figure moves by is what no profile can promise
STEP_ERROR = 0.03
FIGURES = {
    "output tokens/s": ("output_tokens_per_second",),
    "hit rate": ("hit_rate",),
    "TTFT p50": ("ttft_seconds", "p50"),
    "TTFT p90": ("ttft_seconds", "p90"),
    "inter-token p50": ("inter_token_seconds", "p50"),
    "inter-token p90": ("inter_token_seconds", "p90"),
}
SLO = Slo(ttft_seconds=2.0, inter_token_seconds=0.1)


@dataclass(frozen=True, kw_only=True)
class Chats:
    """Sessions start as a Poisson process; the next turn arrives some time after the one before."""

    sessions_per_second: float
    seconds: float
    seed: int
    mean_turns: float = 3.0
    mean_gap_seconds: float = 20.0

    def trace(self) -> Trace:
        rng = np.random.default_rng(self.seed)
        rows: list[tuple[float, int, int, int, int]] = []  # arrival, session, turn, prompt, reply
        start, session = rng.exponential(1 / self.sessions_per_second), 0
        while start < self.seconds:
            at, length = start, SYSTEM_BLOCKS * PAGE_TOKENS
            for turn in range(1, 1 + rng.geometric(1 / self.mean_turns)):
                length += int(rng.integers(20, 300))
                reply = int(rng.integers(16, 120))
                if at < self.seconds:
                    rows.append((at, session, turn, length, reply))
                length, at = length + reply, at + rng.exponential(self.mean_gap_seconds)
            start, session = start + rng.exponential(1 / self.sessions_per_second), session + 1
        rows.sort()
        arrival, of_session, turn, prompt, reply = (np.array(column) for column in zip(*rows, strict=True))
        counts = prompt // PAGE_TOKENS
        ids = [self._blocks(int(s), int(n)) for s, n in zip(of_session, counts, strict=True)]
        return Trace(
            arrival_seconds=arrival,
            prompt_tokens=prompt,
            output_tokens=reply,
            block_ids=np.concatenate(ids),
            block_offsets=offsets_of(counts),
            block_size=PAGE_TOKENS,
            session=of_session,
            turn=turn,
            tenant=np.zeros(len(rows), dtype=np.int64),
            provenance=({"step": "chats", **vars(self)},),
        )

    @staticmethod
    def _blocks(session: int, count: int) -> np.ndarray:
        own = 1000 * (session + 1) + np.arange(count)
        own[:SYSTEM_BLOCKS] = (session % NUM_SYSTEMS) * SYSTEM_BLOCKS + np.arange(min(SYSTEM_BLOCKS, count))
        return own


class ForcedReplies:
    """Computes what the model would draw, and appends what the chat says."""

    texts: list[list[int]]

    def __init__(self, inner: Runner) -> None:
        self._inner = inner

    def execute(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        drawn = self._inner.execute(batch)
        return [
            token and SampledToken(self.texts[int(entry.request.request_id)][entry.request.num_tokens])
            for token, entry in zip(drawn, batch, strict=True)
        ]


class ChatEngine(Engine):
    """An engine whose replies are `forced.texts`, by request id."""

    def __init__(
        self, config: EngineConfig, shape: PageShape, runner: Runner, storage: PageStorage, **options
    ) -> None:
        self.forced = ForcedReplies(runner)
        super().__init__(config, shape, self.forced, storage, **options)


def measured(loaded: LoadedModel, config: EngineConfig, trace: Trace) -> dict[str, list]:
    """Request columns of the engine in real time."""
    engine = build_engine(loaded.llama, config, engine_class=ChatEngine)
    assert isinstance(engine, ChatEngine)
    text = SyntheticText(trace, vocab_size=loaded.tokenizer.vocab_size)
    engine.forced.texts = texts = [text.tokens(row) for row in range(len(trace))]
    _warm_up(engine)
    start = time.monotonic()
    engine.clock = lambda: time.monotonic() - start
    arrivals, ended, row = trace.arrival_seconds.tolist(), [], 0
    while row < len(arrivals) or engine.has_work():
        now = engine.clock()
        while row < len(arrivals) and arrivals[row] <= now:
            sampling = SamplingParams(max_tokens=int(trace.output_tokens[row]), ignore_eos=True)
            prompt = texts[row][: int(trace.prompt_tokens[row])]
            try:
                engine.add_request(str(row), prompt, sampling, arrival_time=arrivals[row])
            except (EngineFullError, RequestError) as error:
                raise SystemExit(f"request {row} was refused: {error}") from error
            row += 1
        if engine.has_work():
            ended += [output.request for output in engine.step() if output.finish_reason]
        else:
            time.sleep(max(min(arrivals[row] - engine.clock(), 0.5), 0.0))
    rows = sorted((request_row(trace, request) for request in ended), key=lambda entry: entry[0])
    return {name: [entry[k] for entry in rows] for k, name in enumerate(REQUEST_COLUMNS)}


def _warm_up(engine: ChatEngine) -> None:
    """Allocators and thread pools; the tokens are no chat's."""
    texts, engine.forced.texts = engine.forced.texts, [[0] * 600]
    engine.add_request("0", list(range(500)), SamplingParams(max_tokens=16, ignore_eos=True))
    while engine.has_work():
        engine.step()
    engine.forced.texts = texts


def compare(real: dict, simulated: dict) -> dict[str, tuple[float, float, float]]:
    """Measured, simulated, relative error of each figure."""
    rows = {}
    for label, path in FIGURES.items():
        a, b = _lookup(real, path), _lookup(simulated, path)
        rows[label] = (a, b, b / a - 1 if a else 0.0)
    return rows


def scaled(profile: LatencyProfile, factor: float) -> LatencyProfile:
    """The same machine, so much slower."""
    single = ("fixed", "prefill_token", "prefill_pair", "prefill_context", "sequence", "moved_byte")
    changes: dict[str, Any] = {name: factor * getattr(profile, name) for name in single}
    for name in ("kv_byte", "convert"):
        changes[name] = {codec: factor * seconds for codec, seconds in getattr(profile, name).items()}
    for name in ("rows", "sampled"):
        changes[name] = tuple((start, factor * slope) for start, slope in getattr(profile, name))
    return replace(profile, **changes)


def spread(trace: Trace, profile: LatencyProfile, config: EngineConfig) -> dict[str, tuple[float, float]]:
    """Lowest and highest simulated value of each figure as steps take up to STEP_ERROR less or more."""
    factors = np.linspace(1 - STEP_ERROR, 1 + STEP_ERROR, 7).tolist()
    summaries = [
        replay_simulated(trace, SimReplay(profile=scaled(profile, factor), engine=config, slo=SLO)).summary
        for factor in factors
    ]
    values = {label: [_lookup(summary, path) for summary in summaries] for label, path in FIGURES.items()}
    return {label: (min(column), max(column)) for label, column in values.items()}


def _lookup(summary: dict, path: tuple[str, ...]) -> float:
    value: Any = summary
    for name in path:
        value = value[name]
    return value


def plot(runs: dict[str, tuple[dict, dict]], path: Path) -> None:
    """Distributions of both, a row per load."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    fields = {"ttft_seconds": "time to first token, s", "inter_token_seconds": "between two tokens (mean), s"}
    figure, axes = plt.subplots(len(runs), len(fields), figsize=(9, 2.6 * len(runs)), squeeze=False)
    for row, (load, columns) in zip(axes, runs.items(), strict=True):
        for axis, (field, label) in zip(row, fields.items(), strict=True):
            for name, requests, style in zip(("engine", "simulator"), columns, ("-", "--"), strict=True):
                values = np.sort([v for v in requests[field] if v is not None])
                axis.plot(values, np.linspace(0, 1, len(values)), style, label=name)
            axis.set(xscale="log", xlabel=label, title=load)
            axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


def run(args: argparse.Namespace, profile: LatencyProfile) -> None:
    loaded = load_model(args.model)
    config = EngineConfig(
        pool_bytes=args.pool_mb << 20,
        page_size=PAGE_TOKENS,
        max_waiting=10_000,
        prefill_chunk=profile.engine["prefill_chunk"],
        knobs=Knobs(max_batch=16, kv_level=args.kv_level, size_factor=0.3, ttl_seconds=30.0),
    )
    report: dict = {
        "profile": profile.name,
        "date": time.strftime("%Y-%m-%d"),
        "seconds": args.seconds,
        "loads": {},
    }
    runs, errors = {}, []
    for load in args.loads.split(","):
        trace = Chats(
            sessions_per_second=SESSIONS_PER_SECOND[load], seconds=args.seconds, seed=args.seed
        ).trace()
        simulated = replay_simulated(trace, SimReplay(profile=profile, engine=config, slo=SLO))
        real = measured(loaded, config, trace)
        runs[load] = (real, simulated.requests)
        rows = compare(summarize(real, {}, SLO), simulated.summary)
        ranges = spread(trace, profile, config)
        errors += [abs(error) for _, _, error in rows.values()]
        report["loads"][load] = {"requests": len(trace), **rows, "spread": ranges}
        print(f"{load}: {len(trace)} requests")
        for label, (a, b, error) in rows.items():
            low, high = ranges[label]
            print(
                f"  {label:16} measured {a:9.4f}  simulated {b:9.4f}  {100 * error:+6.1f} %"
                f"   (steps +-{STEP_ERROR:.0%}: {low:.4f} .. {high:.4f})"
            )
    report["median_error"], report["largest_error"] = float(np.median(errors)), max(errors)
    print(f"median error {100 * report['median_error']:.1f} %, largest {100 * report['largest_error']:.1f} %")
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if args.plot:
        plot(runs, args.plot)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--profile", default="cpu-smollm2")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--loads", default=",".join(SESSIONS_PER_SECOND))
    parser.add_argument("--pool-mb", type=int, default=96)
    parser.add_argument("--kv-level", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads: as in the calibration")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    profile = load_profile(args.profile)
    threads = args.threads or profile.origin.get("threads")
    if isinstance(threads, int):
        torch.set_num_threads(threads)
    run(args, profile)


if __name__ == "__main__":
    main()
