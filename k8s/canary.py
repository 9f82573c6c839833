"""One trial of acting pods against pods that only advise, at the same time, over one window.

Nothing is decided before the window is over, so that many looks do not make a chance result likely. The guard
watches the SLO of the acting pods meanwhile; a trial only answers whether they are worse than the others.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from kvpilot.engine.errors import KVPilotError
from kvpilot.engine.stats import StatsSnapshot, StatsWindow
from kvpilot.k8s.gates import GateResult, Outcome, evaluate, overall
from kvpilot.k8s.policy_resource import CanarySettings
from kvpilot.k8s.workload import Pod

Fetch = Callable[[str], StatsSnapshot]  # the statistics at a /metrics URL; KVPilotError if they cannot be had


class Reason(StrEnum):
    TOO_FEW_PODS = "TooFewPods"  # no baseline would be left
    WARMING_UP = "WarmingUp"
    OBSERVING = "Observing"
    MISSING_SAMPLES = "MissingSamples"  # the window is over and too little was measured
    TIMED_OUT = "TimedOut"  # and that for too long
    GATES_PASSED = "GatesPassed"
    GATE_FAILED = "GateFailed"


@dataclass(frozen=True, kw_only=True)
class TrialState:
    """`passed` is None while it is open."""

    reason: Reason
    message: str
    passed: bool | None = None
    results: tuple[GateResult, ...] = ()


class Trial:
    """Of fixed pods: when one of them changes, a new trial has to begin. `now` is a monotonic time in seconds."""

    def __init__(
        self, settings: CanarySettings, canary: Sequence[Pod], baseline: Sequence[Pod], *, now: float
    ) -> None:
        assert canary
        assert baseline
        self.settings, self.canary, self.baseline = settings, tuple(canary), tuple(baseline)
        self._began = now
        self._start: dict[str, StatsSnapshot] | None = None  # by pod, when the window began
        self._start_time = now
        self._decided: TrialState | None = None

    @property
    def pods(self) -> tuple[Pod, ...]:
        return (*self.canary, *self.baseline)

    def advance(self, now: float, fetch: Fetch) -> TrialState:
        """Looks at the clock and, at both ends of the window, at the pods."""
        if self._decided is None:
            state = self._advance(now, fetch)
            if state.passed is None:
                return self._timed_out(now, state)
            self._decided = state
        return self._decided

    def _advance(self, now: float, fetch: Fetch) -> TrialState:
        settings = self.settings
        warm_at = self._began + settings.warmup_seconds
        if now < warm_at:
            return TrialState(reason=Reason.WARMING_UP, message=f"for {settings.warmup_seconds} s")
        if self._start is None:
            return self._open_window(now, fetch)
        over_at = self._start_time + settings.observe_seconds
        if now < over_at:
            return self._observing()
        return self._judge(now, fetch)

    def _open_window(self, now: float, fetch: Fetch) -> TrialState:
        snapshots, missing = self._fetch_all(fetch)
        if missing:
            return TrialState(reason=Reason.MISSING_SAMPLES, message=missing)
        self._start, self._start_time = snapshots, now
        return self._observing()

    def _observing(self) -> TrialState:
        """No countdown: a message that changes with every look would be written with every look."""
        return TrialState(reason=Reason.OBSERVING, message=f"for {self.settings.observe_seconds} s")

    def _judge(self, now: float, fetch: Fetch) -> TrialState:
        assert self._start is not None
        ends, missing = self._fetch_all(fetch)
        if missing:
            return TrialState(reason=Reason.MISSING_SAMPLES, message=missing)
        windows = {pod: StatsWindow(start=self._start[pod], end=end) for pod, end in ends.items()}
        reset = [pod for pod, window in windows.items() if window.is_reset() or window.seconds <= 0]
        if reset:
            self._start, self._start_time = ends, now
            return TrialState(
                reason=Reason.MISSING_SAMPLES, message=f"restarted: {', '.join(reset)}; once more"
            )
        sides = [[windows[pod.name] for pod in side] for side in (self.canary, self.baseline)]
        return _verdict(evaluate(self.settings.gates, *sides))

    def _timed_out(self, now: float, state: TrialState) -> TrialState:
        if now < self._began + self.settings.timeout_seconds:
            return state
        self._decided = TrialState(
            reason=Reason.TIMED_OUT, message=state.message, passed=False, results=state.results
        )
        return self._decided

    def _fetch_all(self, fetch: Fetch) -> tuple[dict[str, StatsSnapshot], str]:
        """The snapshots, or why one is missing."""
        snapshots: dict[str, StatsSnapshot] = {}
        for pod in self.pods:
            try:
                snapshots[pod.name] = fetch(pod.metrics_url)
            except KVPilotError as error:
                return {}, f"{pod.name}: {error}"
        return snapshots, ""


def _verdict(results: tuple[GateResult, ...]) -> TrialState:
    outcome = overall(results)
    shown = "; ".join(
        str(result) for result in results if outcome is Outcome.PASSED or result.outcome is outcome
    )
    match outcome:
        case Outcome.PASSED:
            return TrialState(reason=Reason.GATES_PASSED, message=shown, passed=True, results=results)
        case Outcome.FAILED:
            return TrialState(reason=Reason.GATE_FAILED, message=shown, passed=False, results=results)
        case Outcome.MISSING:
            return TrialState(reason=Reason.MISSING_SAMPLES, message=shown, results=results)
