"""A policy behind a deadline: one that raises, hangs or says nonsense is a failure, never an end of the loop."""

import logging
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from kvpilot.agent.control.nouns import Failure
from kvpilot.agent.guard import Reason, Refusal
from kvpilot.engine.config import KnobBounds
from kvpilot.env.observation import Observation
from kvpilot.env.policy import KnobValues, Policy, Proposal

log = logging.getLogger("kvpilot.agent")


class DeadlinePolicy:
    """Runs `policy` in a thread of its own. While a call hangs the next ones fail at once, and a late answer is
    dropped: it rested on another observation."""

    def __init__(self, policy: Policy, *, deadline_seconds: float, fallback: Policy | None = None) -> None:
        self.policy, self.fallback, self.deadline_seconds = policy, fallback, deadline_seconds
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], queue.SimpleQueue[Any]]] = queue.SimpleQueue()
        self._busy = threading.Event()
        self._reset_due = False
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        return self.policy.name

    def outside(self, observation: Observation) -> str:
        """A learned policy knows what it was trained on; a rule has no such bounds."""
        distance = getattr(self.policy, "envelope_distance", None)
        if distance is None or not self.policy.is_outside_envelope(observation):  # pyright: ignore[reportAttributeAccessIssue]
            return ""
        return f"{distance(observation):.2f} beyond the training windows, where every signal spans 1"

    def reset(self) -> None:
        """Takes effect before the next proposal."""
        self._reset_due = True

    def propose(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal | Failure:
        return self._within_deadline(self.policy, observation, knobs, bounds)

    def propose_outside(
        self, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal | Failure | None:
        if self.fallback is None:
            return None
        return self._within_deadline(self.fallback, observation, knobs, bounds)

    def _within_deadline(
        self, policy: Policy, observation: Observation, knobs: KnobValues, bounds: Mapping[str, KnobBounds]
    ) -> Proposal | Failure:
        if self._busy.is_set():
            return _failure(Reason.DEADLINE, "the policy still has not answered an earlier call")
        resets, self._reset_due = self._reset_due, False

        def call() -> Proposal:
            if resets:
                for one in (self.policy, self.fallback):
                    if one is not None:
                        one.reset()
            return checked_proposal(policy.propose(observation, knobs, bounds))

        answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._busy.set()
        self._start()
        self._calls.put((call, answers))
        try:
            answer = answers.get(timeout=self.deadline_seconds)
        except queue.Empty:
            return _failure(Reason.DEADLINE, f"no answer within {self.deadline_seconds:g} s")
        if isinstance(answer, BaseException):
            log.error("the policy failed", exc_info=answer)
            return _failure(Reason.POLICY, f"{type(answer).__name__}: {answer}")
        return answer

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="policy", daemon=True)
            self._thread.start()

    def _work(self) -> None:
        while True:
            call, answers = self._calls.get()
            try:
                answer: Any = call()
            except Exception as error:  # noqa: BLE001 - told to the caller, who counts it
                answer = error
            self._busy.clear()
            answers.put(answer)


def checked_proposal(answer: object) -> Proposal:
    """A policy's answer in its proper types; TypeError if it is something else."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise TypeError(f"a policy must return a Proposal, not {answer!r:.80}")
    knobs, reason = answer
    if not isinstance(knobs, Mapping) or not all(isinstance(name, str) for name in knobs):
        raise TypeError(f"a proposal's knobs must map names to values, not {knobs!r:.80}")
    return Proposal(knobs, str(reason))


def _failure(reason: Reason, detail: str) -> Failure:
    return Failure(Refusal(reason, None, detail))
