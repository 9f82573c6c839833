"""Which traffic a command is about: the standard workloads, files, or one trace."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

from kvpilot.engine.errors import ConfigError
from kvpilot.env.traces.readers import read_trace
from kvpilot.env.tuning.standard import standard_workloads
from kvpilot.env.tuning.workload import Regime, StreamSpec, Workload, load_workload

SPREAD = 1.3  # a trace's load is drawn from so many times less to so many times more than recorded


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """At most one of `files` and `trace`; without either the standard workloads of `traces`."""

    traces: Path | None = None  # a folder
    files: tuple[Path, ...] = ()  # workloads as TOML or JSON
    trace: Path | None = None
    users: int | None = None  # of the trace, in closed loop
    only: tuple[str, ...] = ()  # workloads by name
    slo_ttft_seconds: float | None = None  # in place of the workload's own
    slo_inter_token_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.files and self.trace is not None:
            raise ConfigError("workload and trace are both given: expected one of them")
        if self.users is not None and self.trace is None:
            raise ConfigError(f"users={self.users!r} is invalid: it is for a single trace (--trace)")

    @property
    def label(self) -> str:
        """Of all of them together."""
        if self.trace is not None:
            return self.trace.name
        base = "+".join(path.name for path in self.files) or "standard"
        return f"{base}: {', '.join(self.only)}" if self.only else base

    def workloads(self, split: str) -> dict[str, Workload]:
        """By name. Raises ConfigError, or TraceError where traces are missing."""
        known = {name: self._with_slo(one.with_(split=split)) for name, one in self._all().items()}
        unknown = [name for name in self.only if name not in known]
        if unknown:
            raise ConfigError(f"only={unknown[0]!r} is invalid: expected some of {', '.join(known)}")
        return {name: one for name, one in known.items() if not self.only or name in self.only}

    def _all(self) -> dict[str, Workload]:
        if self.trace is not None:
            return {self.trace.stem: workload_of_trace(self.trace, self.users)}
        if self.files:
            return _by_name([load_workload(path, self.traces) for path in self.files])
        if self.traces is None:
            raise ConfigError(
                "traces=None is invalid: expected the folder of the traces (--traces or the environment's "
                "KVPILOT_TRACES), a workload (--workload) or a trace (--trace)"
            )
        return standard_workloads(self.traces)

    def _with_slo(self, workload: Workload) -> Workload:
        asked = {"ttft_seconds": self.slo_ttft_seconds, "inter_token_seconds": self.slo_inter_token_seconds}
        given = {name: value for name, value in asked.items() if value is not None}
        return workload.with_(slo=replace(workload.slo, **given))


def workload_of_trace(path: Path, users: int | None = None) -> Workload:
    """One regime: the trace's sessions in random order, at the rate at which they were recorded, or `users` of them
    at a time."""
    trace = read_trace(path)
    hours_long = (7200.0, 7200.0)
    if users is not None:
        level, loop = float(users), "closed"
    else:
        num_sessions = len(set(trace.session.tolist()))
        level, loop = num_sessions / max(trace.duration_seconds, 1.0), "open"
    if not 0 < level < inf:
        raise ConfigError(f"{path}: {level:g} sessions at a time are invalid: expected a number > 0")
    return Workload(
        name=path.stem,
        folder=str(path.parent),
        streams={"trace": StreamSpec(file=path.name, loop=loop)},
        regimes={"recorded": Regime(seconds=hours_long, levels={"trace": (level / SPREAD, level * SPREAD)})},
    )


def _by_name(workloads: Sequence[Workload]) -> dict[str, Workload]:
    named = {workload.name: workload for workload in workloads}
    if len(named) < len(workloads):
        raise ConfigError(f"workloads {[w.name for w in workloads]!r} are invalid: expected different names")
    return named
