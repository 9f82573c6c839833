"""What to compose, as a TOML file or from flags, and doing it.

seed = 1
combine = "switch"            # mix (default), switch or concatenate
switch_seconds = [600]

[[sources]]
file = "conversation.jsonl"   # relative to this file
scale = 0.125

[[sources]]
file = "sessions.tar.xz"
sessions_per_second = 0.05
block_size = 512
curve = { file = "rates.tar.xz", client = "language/m-large", seconds = 3600 }
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kvpilot.engine.errors import ConfigError
from kvpilot.env.table import TableReader, read_table
from kvpilot.env.traces import compose
from kvpilot.env.traces.detect import detect
from kvpilot.env.traces.readers import ReadOptions, read_trace
from kvpilot.env.traces.servegen import LengthWindow, RateCurve, generate, read_length_series, read_rate_curve
from kvpilot.env.traces.source import Source
from kvpilot.env.traces.trace import Trace, TraceError

COMBINERS = ("mix", "switch", "concatenate")


@dataclass(frozen=True, kw_only=True)
class CurveSpec:
    """A rate curve: ServeGen rates, or the arrivals of any trace."""

    file: Path
    client: str = ""  # ServeGen: sums the clients whose name starts so
    seconds: float | None = None  # squeezed or spread to so long
    window_seconds: float = 60.0  # of a trace's arrivals


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """One file and what is done to it, in the order of these fields."""

    file: Path  # a trace, or ServeGen length distributions (then `curve` says when requests come)
    format: str = "auto"
    skip_bad: bool = False
    sessions_per_second: float = ReadOptions.sessions_per_second  # agentic archives
    max_tokens: int | None = None  # drops requests with a longer context
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    shrink: int = 1  # divides lengths and block size
    block_size: int | None = None
    sample: float = 1.0  # share of the sessions
    scale: float = 1.0  # arrivals, by fewer or more sessions
    curve: CurveSpec | None = None  # of session starts
    requests: int | None = None  # to generate from length distributions
    window: tuple[float, float] | None = None  # seconds


@dataclass(frozen=True, kw_only=True)
class ComposeSpec:
    sources: tuple[SourceSpec, ...]
    combine: str = "mix"
    switch_seconds: tuple[float, ...] = ()
    seed: int = 0
    window: tuple[float, float] | None = field(default=None)  # of the result

    def __post_init__(self) -> None:
        if not self.sources:
            raise TraceError("sources is empty: expected at least one file")
        if self.combine not in COMBINERS:
            raise TraceError(f"combine={self.combine!r} is invalid: expected {', '.join(COMBINERS)}")
        if (self.combine == "switch") != bool(self.switch_seconds):
            raise TraceError(
                f"switch_seconds={list(self.switch_seconds)} and combine={self.combine!r} disagree"
            )


def run_spec(spec: ComposeSpec, progress: Callable[[int, int], None] | None = None) -> Trace:
    """The composed trace. `progress` gets sources done and their number."""
    traces = []
    for k, source in enumerate(spec.sources):
        traces.append(_prepare(source, spec.seed + k))
        if progress is not None:
            progress(k + 1, len(spec.sources))
    match spec.combine:
        case "switch":
            result = compose.switch(traces, spec.switch_seconds)
        case "concatenate":
            result = compose.concatenate(traces)
        case _:
            result = compose.mix(traces) if len(traces) > 1 else traces[0]
    return compose.window(result, *spec.window) if spec.window else result


def _prepare(spec: SourceSpec, seed: int) -> Trace:
    curve = None if spec.curve is None else _curve(spec.curve)
    lengths = _lengths(spec)
    if lengths is not None:
        if curve is None:
            raise TraceError(f"{spec.file}: length distributions need a curve that says when requests come")
        trace = generate(curve, lengths, seed=seed, num_requests=spec.requests)
    else:
        options = ReadOptions(seed=seed, sessions_per_second=spec.sessions_per_second)
        trace = read_trace(spec.file, spec.format, spec.skip_bad, options)
    if spec.max_tokens is not None:
        trace = compose.drop_longer(trace, spec.max_tokens)
    if spec.max_prompt_tokens is not None or spec.max_output_tokens is not None:
        trace = compose.clip_lengths(
            trace, max_prompt_tokens=spec.max_prompt_tokens, max_output_tokens=spec.max_output_tokens
        )
    if spec.shrink != 1:
        trace = compose.shrink(trace, spec.shrink)
    if spec.block_size is not None:
        trace = trace.with_block_size(spec.block_size)
    if spec.sample != 1.0:
        trace = compose.sample_sessions(trace, spec.sample, seed=seed)
    if spec.scale != 1.0:
        trace = compose.scale_arrivals(trace, spec.scale, seed=seed)
    if curve is not None and lengths is None:
        trace = compose.modulate(trace, curve, seed=seed)
    return compose.window(trace, *spec.window) if spec.window else trace


def _lengths(spec: SourceSpec) -> tuple[LengthWindow, ...] | None:
    kind = detect(Source(spec.file)) if spec.format == "auto" else spec.format
    return read_length_series(spec.file, skip_bad=spec.skip_bad) if kind == "servegen-lengths" else None


def _curve(spec: CurveSpec) -> RateCurve:
    if detect(Source(spec.file)) == "servegen-rates":
        curve = read_rate_curve(spec.file, spec.client)
    else:
        curve = RateCurve.of_trace(read_trace(spec.file), spec.window_seconds)
    return curve if spec.seconds is None else curve.lasting(spec.seconds)


# ---------------------------------------------------------------------- TOML
def load_spec(path: Path) -> ComposeSpec:
    """A spec file; TraceError names what is wrong in it. Files are relative to the spec."""
    reader = TableReader(folder=path.parent)
    try:
        table = read_table(path)
        sources = table.pop("sources", [])
        if not isinstance(sources, list) or not all(isinstance(source, dict) for source in sources):
            raise TraceError(f"{path}: sources is invalid: expected [[sources]] tables")
        made = [
            reader.build(SourceSpec, source, f"{path}: source {k}") for k, source in enumerate(sources, 1)
        ]
        return reader.build(ComposeSpec, {**table, "sources": made}, str(path))
    except ConfigError as error:
        raise TraceError(str(error)) from error
