"""What the proposed knobs would have given: the traffic, recorded or drawn from live statistics, simulated in a process
of its own beside the loop.

The simulation has the lowest priority and its memory goes when it ends, so that the sidecar stays small.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from kvpilot.agent.control.audit import AuditError, AuditLog
from kvpilot.agent.control.config import CounterfactualSettings, RunSettings
from kvpilot.agent.control.nouns import Decision, Inputs, Outcome
from kvpilot.agent.counterfactual.statistics import TooLittleSeenError, TrafficStatistics, WatchedSource
from kvpilot.agent.policies.changes import clip_knobs
from kvpilot.engine.errors import ConfigError, KVPilotError
from kvpilot.exporter.source import Source

log = logging.getLogger("kvpilot.agent")
WORKER = "kvpilot.agent.counterfactual.worker"
FIGURES = ("hit_rate", "ttft_p99_seconds", "e2e_mean_seconds", "objective")


class CounterfactualError(KVPilotError):
    """The simulation gave no answer; the message holds what it said."""


class Figures(Protocol):
    """Told of every result; AgentMetrics is the one that shows them."""

    def set_counterfactual(
        self, traffic: str, proposed: Mapping[str, float | None], present: Mapping[str, float | None]
    ) -> None: ...


class Question(NamedTuple):
    present: dict[str, float]
    proposed: dict[str, float]  # equal to `present` where the policy wants what is
    pool_bytes: float | None = None  # None: the profile's

    @property
    def changed(self) -> set[str]:
        """The knobs that the policy wants to be different."""
        return {name for name, value in self.proposed.items() if value != self.present[name]}


class Counterfactual:
    """A context manager; simulates from entry to exit, whenever the last question is `every_seconds` old."""

    def __init__(
        self,
        settings: CounterfactualSettings,
        slo: Mapping[str, float | None],
        audit: AuditLog,
        figures: Figures,
    ) -> None:
        assert settings.trace is not None or settings.statistics
        if settings.trace is not None and not settings.trace.parent.is_dir():  # the file may be written later
            raise ConfigError(
                f"counterfactual.trace={str(settings.trace)!r} is invalid: there is no such folder; "
                "expected the file that `autotune serve --record FILE` writes"
            )
        self._settings, self._slo, self._audit, self._figures = settings, dict(slo), audit, figures
        self.traffic = "recorded" if settings.trace is not None else "estimated"
        self._statistics = TrafficStatistics(settings.window_seconds)
        self._question: Question | None = None
        self._stop = threading.Event()
        self._asked = threading.Event()
        self._worker: subprocess.Popen[str] | None = None
        self._thread = threading.Thread(target=self._work, name="counterfactual", daemon=True)

    @classmethod
    def from_settings(
        cls, settings: RunSettings, audit: AuditLog, figures: Figures
    ) -> "Counterfactual | None":
        if settings.counterfactual.trace is None and not settings.counterfactual.statistics:
            return None
        return cls(settings.counterfactual, settings.slo.model_dump(), audit, figures)

    def __enter__(self) -> "Counterfactual":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._asked.set()
        if self._worker is not None:
            self._worker.kill()
        self._thread.join(5)

    def watch(self, source: Source) -> Source:
        """The source to observe by: what it gives is the statistics that traffic is drawn from."""
        return source if self.traffic == "recorded" else WatchedSource(source, self._statistics)

    def note(self, decision: Decision, inputs: Inputs | None) -> None:
        """Remembers what the policy wants, as far as the engine has it; of decisions only."""
        if inputs is None or decision.outcome in (Outcome.OBSERVED, Outcome.HELD):
            return
        present = dict(inputs.state.requested)
        pool_bytes = self._settings.pool_bytes or inputs.signals.get("pool_bytes")
        self._question = Question(present, {**present, **_clipped(decision.wanted, inputs)}, pool_bytes)
        self._asked.set()

    def _work(self) -> None:
        while not self._stop.is_set():
            self._asked.wait()
            question = self._question
            if question is not None and not self._stop.is_set():
                self._answer(question)
            self._asked.clear()
            self._stop.wait(self._settings.every_seconds)

    def _answer(self, question: Question) -> None:
        try:
            answer = self.simulate(question)
        except TooLittleSeenError as error:
            log.info("no counterfactual yet: %s", error)
            return
        except CounterfactualError as error:
            if not self._stop.is_set():
                log.warning("no counterfactual: %s", error)
            return
        proposed, present = answer["proposed"], answer["present"]
        self._figures.set_counterfactual(self.traffic, proposed, present)
        log.info("counterfactual, %s: %s", traffic_in_words(self.traffic, answer), in_words(question, answer))
        record = {
            "kind": "counterfactual",
            "time": round(time.time(), 3),
            "traffic": self.traffic,
            **question._asdict(),
            "result": answer,
        }
        try:
            self._audit.write(record)
        except AuditError as error:
            log.warning("%s", error)

    def simulate(self, question: Question) -> dict[str, Any]:
        """Runs the worker; CounterfactualError if it fails or takes longer than `timeout_seconds`, TooLittleSeenError
        if there is no traffic to draw from yet."""
        settings = self._settings
        job = {
            **question._asdict(),
            **(
                {"trace": str(settings.trace)}
                if settings.trace
                else {"statistics": self._statistics.describe()}
            ),
            "profile": settings.profile,
            "window_seconds": settings.window_seconds,
            "slo": self._slo,
        }
        command = [sys.executable, "-P", "-m", WORKER]
        self._worker = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            out, err = self._worker.communicate(json.dumps(job), timeout=settings.timeout_seconds)
        except subprocess.TimeoutExpired:
            self._worker.kill()
            self._worker.communicate()
            raise CounterfactualError(
                f"no answer within {settings.timeout_seconds:g} s: shorten counterfactual.window_seconds"
            ) from None
        if self._worker.returncode != 0:
            raise CounterfactualError(err.strip().splitlines()[-1] if err.strip() else "the worker died")
        return json.loads(out)


def traffic_in_words(traffic: str, answer: Mapping[str, Any]) -> str:
    """Over what it was simulated; an estimate is called one."""
    if traffic == "recorded":
        return f"{answer['requests']} recorded requests"
    simulated, measured = answer["present"]["hit_rate"], answer["hit_rate_measured"]
    return (
        f"an estimate over {answer['requests']} requests drawn from statistics, which hit {_short(simulated)} "
        f"where {_short(measured)} was measured"
    )


def in_words(question: Question, answer: Mapping[str, Any]) -> str:
    """Present -> proposed, figure by figure."""
    changed = [f"{name}={value:g}" for name, value in question.proposed.items() if name in question.changed]
    figures = ", ".join(
        f"{name} {_short(answer['present'][name])} -> {_short(answer['proposed'][name])}" for name in FIGURES
    )
    return f"{' '.join(changed) or 'no change wanted'}: {figures}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _clipped(wanted: Mapping[str, object], inputs: Inputs) -> dict[str, float]:
    """Without what is no number: the guard refuses that."""
    numbers = {
        name: value
        for name, value in wanted.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and value == value
    }
    return clip_knobs(numbers, inputs.state.bounds)
