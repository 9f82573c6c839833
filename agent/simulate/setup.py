"""What `autotune replay` and `sensitivity` simulate: requests of a trace, on an engine with the shape of a profile."""

from dataclasses import dataclass
from pathlib import Path

from kvpilot.engine.config import EngineConfig, Knobs
from kvpilot.engine.errors import ConfigError
from kvpilot.env.simulator.latency import LatencyProfile
from kvpilot.env.traces.compose import drop_longer, sample_sessions
from kvpilot.env.traces.readers import ReadOptions, read_trace
from kvpilot.env.traces.trace import Trace


@dataclass(frozen=True, kw_only=True)
class Requests:
    """Those of a file that are replayed."""

    file: Path
    format: str = "auto"
    sessions_per_second: float = 1 / 60  # of archives that do not say when sessions began
    sample: float = 1.0  # share of the sessions
    seed: int = 0  # of all that is drawn
    max_tokens: int | None = None  # longer ones are dropped

    def read(self) -> Trace:
        """Raises TraceError."""
        options = ReadOptions(seed=self.seed, sessions_per_second=self.sessions_per_second)
        trace = read_trace(self.file, self.format, options=options)
        if self.sample != 1.0:
            trace = sample_sessions(trace, self.sample, seed=self.seed)
        return trace if self.max_tokens is None else drop_longer(trace, self.max_tokens)


@dataclass(frozen=True, kw_only=True)
class Envelope:
    """What is asked for; None: as the profile says, and for pages as long as the trace's blocks."""

    pool_mb: int | None = None
    page_size: int | None = None
    eviction: str = "lru"
    starvation_seconds: float = 300.0
    ttl_seconds: float = 0.0
    size_factor: float = 0.0
    max_batch: int | None = None
    kv_level: int = 0

    def engine(self, profile: LatencyProfile, trace: Trace) -> EngineConfig:
        """What is left open by the profile too is the engine's default. Raises ConfigError."""
        known = profile.engine_config()
        ceiling = known.max_batch_ceiling
        if self.max_batch is not None and self.max_batch > ceiling:
            raise ConfigError(
                f"--max-batch={self.max_batch} is invalid: expected at most {ceiling}, "
                f"the max_batch_ceiling of profile {profile.name!r}"
            )
        changes = {} if self.pool_mb is None else {"pool_bytes": self.pool_mb << 20}
        return profile.engine_config(
            **changes,
            page_size=trace.block_size if self.page_size is None else self.page_size,
            eviction=self.eviction,
            starvation_seconds=self.starvation_seconds,
            knobs=Knobs(
                ttl_seconds=self.ttl_seconds,
                size_factor=self.size_factor,
                max_batch=known.knobs.max_batch if self.max_batch is None else self.max_batch,
                kv_level=self.kv_level,
            ),
        )
