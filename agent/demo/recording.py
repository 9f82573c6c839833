"""What one run of the demo left: samples of the engine, results of the requests, decisions of the loop."""

import os
import time
from dataclasses import dataclass, field

from kvpilot.agent.control.controller import Decision
from kvpilot.agent.demo.load import TurnResult
from kvpilot.agent.demo.traffic import Phase
from kvpilot.engine.config import KNOB_NAMES
from kvpilot.engine.stats import StatsSnapshot, StatsWindow
from kvpilot.env.observation import observe


@dataclass(kw_only=True)
class Recording:
    """Grows while the run goes on, so that an interrupted run keeps what it has. Times are seconds since
    the run's start on this process's monotonic clock, whose value then was `started`."""

    name: str
    started: float = 0.0
    seconds: float = 0.0  # length so far
    finished: bool = False
    load_average: float = 0.0  # of the machine over one minute, the highest seen
    samples: list[dict] = field(default_factory=list)
    results: list[TurnResult] = field(default_factory=list)
    decisions: list[tuple[float, Decision]] = field(default_factory=list)
    quality_loss: dict[str, float] = field(default_factory=dict)  # KL in nats per token, by codec
    _last: StatsSnapshot | None = None

    def add(self, snapshot: StatsSnapshot) -> None:
        """One more sample: the window since the previous snapshot."""
        self.seconds = time.monotonic() - self.started
        self.load_average = max(self.load_average, os.getloadavg()[0])
        if self._last is not None:
            self.samples.append(_sample(StatsWindow(start=self._last, end=snapshot), self.seconds))
        self._last = snapshot
        self.quality_loss = {k[1][0]: v for k, v in snapshot.values.items() if k[0] == "kv_quality_loss"}

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "finished": self.finished,
            "load_average": round(self.load_average, 2),
            "seconds": round(self.seconds, 3),
            "quality_loss": self.quality_loss,
            "samples": self.samples,
            "results": [result.as_dict() for result in self.results],
            "decisions": [{"t": round(t, 3), **decision.as_dict()} for t, decision in self.decisions],
        }


def phase_at(phases: tuple[Phase, ...], seconds_per_phase: float, t: float) -> str:
    return phases[min(int(t / seconds_per_phase), len(phases) - 1)].name


def _sample(window: StatsWindow, now: float) -> dict[str, object]:
    observation = observe(window)
    values = window.end.values
    return {
        "t": round(now, 3),
        "seconds": round(window.seconds, 3),
        "running": observation.running,
        "waiting": observation.waiting,
        "query_tokens": window.total("prefix_query_tokens"),
        "hit_tokens": window.total("prefix_hit_tokens"),
        "generation_tokens": window.total("generation_tokens"),
        "prefill_tokens": window.total("prefill_tokens"),
        "preemptions": window.total("preemptions"),
        "stepped_down": window.total("pages_stepped_down"),
        "ttft_p50_seconds": observation.ttft_p50_seconds,
        "inter_token_p50_seconds": observation.inter_token_p50_seconds,
        "pages": _by_level(window.end, "pages"),
        "page_bytes": _by_level(window.end, "page_bytes"),
        "pool_bytes": values.get(("pool_bytes", ())),
        "free_bytes": values.get(("pool_free_bytes", ())),
        "capacity_tokens": {k[1][0]: v for k, v in values.items() if k[0] == "pool_capacity_tokens"},
        "knobs": {name: values.get(("knob", (name,))) for name in KNOB_NAMES},
    }


def _by_level(snapshot: StatsSnapshot, metric: str) -> dict[str, float]:
    """Over all states but free."""
    sums: dict[str, float] = {}
    for (name, labels), value in snapshot.values.items():
        if name == metric and labels[0] != "free":
            sums[labels[1]] = sums.get(labels[1], 0.0) + value
    return sums
