"""One round for one KVPolicy: look, decide, write the control document, say so in the status."""

import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, NamedTuple

from kvpilot.k8s.canary import Fetch, Reason, Trial, TrialState
from kvpilot.k8s.cluster import Cluster
from kvpilot.k8s.control_document import ControlDocument, PolicySource
from kvpilot.k8s.distribution import (
    config_map_body,
    is_foreign,
    make_document,
    next_revision,
    policy_problem,
    read_document,
)
from kvpilot.k8s.errors import StaleWriteError
from kvpilot.k8s.policy_resource import KVPolicy, SpecError, has_kill_annotation, parse_policy
from kvpilot.k8s.status import Condition, Fact, find_condition, gate_entries, merge_conditions
from kvpilot.k8s.workload import Hold, Pod, choose_canaries, mounted_at, selector_of, serving_pods, why_hold

log = logging.getLogger(__name__)
FALLBACK = PolicySource(name="threshold")  # named in a document that holds because the policy is not ready


class CanaryView(NamedTuple):
    """Where a canary stands: the mode that follows, the pods that act, and what is to be said."""

    mode: str
    pods: tuple[str, ...] = ()
    fact: Fact | None = None
    state: TrialState | None = None


@dataclass
class Round:
    """What one round finds out, written at its end."""

    resource: dict[str, Any]
    leads: Callable[[], bool]
    facts: dict[Condition, Fact] = field(default_factory=dict)
    document: ControlDocument | None = None
    canary: CanaryView | None = None


class Reconciler:
    """Keeps the open trials between rounds; everything else is in the cluster. Not thread-safe."""

    def __init__(self, cluster: Cluster, *, fetch: Fetch, policy_names: Collection[str]) -> None:
        self._cluster, self._fetch, self._policy_names = cluster, fetch, policy_names
        self._trials: dict[str, tuple[int, Trial]] = {}  # by uid of the KVPolicy, with its generation

    def forget_trials(self, uids: Collection[str]) -> None:
        """Drops the trials of all KVPolicies but these: the others are gone, or someone else leads them."""
        self._trials = {uid: trial for uid, trial in self._trials.items() if uid in uids}

    def reconcile(
        self, resource: dict[str, Any], rivals: Sequence[str], *, leads: Callable[[], bool], now: float
    ) -> None:
        """`rivals` are older KVPolicies of the same target, `now` a monotonic time, `leads` is asked before writing.

        ClusterError if the round could not be finished; the next one begins afresh.
        """
        round_ = Round(resource, leads)
        try:
            policy = parse_policy(resource)
        except SpecError as error:
            round_.facts[Condition.ACCEPTED] = Fact(False, "InvalidSpec", str(error))
            self._report(round_)
            return
        if rivals:
            says = f"{policy.target} already belongs to KVPolicy {rivals[0]}"
            round_.facts[Condition.ACCEPTED] = Fact(False, "TargetConflict", says)
        else:
            round_.facts[Condition.ACCEPTED] = Fact(True, "Valid")
            self._decide(round_, policy, now)
        self._report(round_)

    def _decide(self, round_: Round, policy: KVPolicy, now: float) -> None:
        facts, workload = round_.facts, self._cluster.workload(policy.target)
        kill = policy.kill or (workload is not None and has_kill_annotation(workload))
        if workload is None:
            facts[Condition.TARGET_FOUND] = Fact(False, "NotFound", f"there is no {policy.target}")
            hold, pods = Hold("TargetMissing", f"there is no {policy.target}"), []
        else:
            facts[Condition.TARGET_FOUND] = Fact(True, "Found", str(policy.target))
            hold, pods = why_hold(workload), serving_pods(self._cluster.pods(selector_of(workload)))
        source, problem = self._policy_source(policy, workload)
        facts[Condition.POLICY_READY] = problem or Fact(True, "Ready")
        if problem is not None:
            hold = hold or Hold("PolicyNotReady", problem.message)
        facts[Condition.HOLDING] = Fact(True, *hold) if hold else Fact(False, "Steady")
        view = CanaryView(policy.mode)
        if policy.mode == "canary":
            waits = "the kill switch is on" if kill else hold and hold.message
            view = self._canary(policy, round_.resource, pods, waits=waits, now=now)
            assert view.fact is not None
            facts[Condition.CANARY_PASSED] = view.fact
            round_.canary = view
        self._distribute(round_, policy, view, kill=kill, hold=hold, source=source)

    def _policy_source(
        self, policy: KVPolicy, workload: Mapping[str, Any] | None
    ) -> tuple[PolicySource, Fact | None]:
        """What the document names, and what is wrong with it."""
        if policy.config_map is None:
            assert policy.builtin is not None
            if policy.builtin not in self._policy_names:
                known = ", ".join(sorted(self._policy_names))
                return FALLBACK, Fact(False, "UnknownPolicy", f"{policy.builtin!r} is not one of {known}")
            return PolicySource(name=policy.builtin), None
        source = policy.config_map
        path = mounted_at(workload, source.name, source.key) if workload else None
        problem = policy_problem(source, self._cluster.config_map(source.name), path)
        if problem is not None or path is None:
            return FALLBACK, Fact(False, *(problem or ("NotMounted", "there is no target")))
        return PolicySource(file=path, sha256=source.sha256), None

    def _canary(
        self, policy: KVPolicy, resource: Mapping[str, Any], pods: list[Pod], *, waits: str | None, now: float
    ) -> CanaryView:
        """A verdict belongs to the generation that it was reached for: only a new specification opens it again."""
        status = resource.get("status", {})
        verdict = find_condition(status, Condition.CANARY_PASSED)
        decided = (
            verdict is not None
            and verdict["observedGeneration"] == policy.generation
            and verdict["status"] != "Unknown"
        )
        previous = status.get("canary", {}).get("pods", ())
        chosen = choose_canaries(pods, policy.canary.replicas, previous)
        if decided:
            assert verdict is not None
            self._trials.pop(policy.uid, None)
            passed = verdict["status"] == "True"
            fact = Fact(passed, verdict["reason"], verdict["message"])
            return self._after(policy, passed, chosen, fact)
        if waits is not None:
            self._trials.pop(policy.uid, None)
            return CanaryView("canary", chosen, Fact(None, "Holding", waits))
        if not chosen:
            self._trials.pop(policy.uid, None)
            message = f"{len(pods)} pods serve: {policy.canary.replicas} canaries and a baseline are needed"
            return CanaryView("canary", (), Fact(None, Reason.TOO_FEW_PODS.value, message))
        state = self._trial(policy, pods, chosen, now).advance(now, self._fetch)
        fact = Fact(state.passed, state.reason.value, state.message)
        if state.passed is None:
            return CanaryView("canary", chosen, fact, state)
        return self._after(policy, state.passed, chosen, fact)._replace(state=state)

    @staticmethod
    def _after(policy: KVPolicy, passed: bool, chosen: tuple[str, ...], fact: Fact) -> CanaryView:
        if not passed:
            return CanaryView("advisory", (), fact)
        if policy.canary.promote:
            return CanaryView("auto", (), fact)
        return CanaryView("canary", chosen, fact)

    def _trial(self, policy: KVPolicy, pods: list[Pod], chosen: tuple[str, ...], now: float) -> Trial:
        """The open trial, or a new one if the specification or a pod has changed."""
        canary = [pod for pod in pods if pod.name in chosen]
        baseline = [pod for pod in pods if pod.name not in chosen]
        generation, trial = self._trials.get(policy.uid, (0, None))
        if trial is None or generation != policy.generation or trial.pods != (*canary, *baseline):
            trial = Trial(policy.canary, canary, baseline, now=now)
            self._trials[policy.uid] = (policy.generation, trial)
        return trial

    def _distribute(
        self,
        round_: Round,
        policy: KVPolicy,
        view: CanaryView,
        *,
        kill: bool,
        hold: Hold | None,
        source: PolicySource,
    ) -> None:
        """Writes the document if it differs from what is there. A foreign edit stays, unless the switch is pulled."""
        name = policy.target.control_map
        current = self._cluster.config_map(name)
        written = read_document(current)
        document = make_document(
            policy,
            mode=view.mode,
            kill=kill,
            hold=hold.message if hold else None,
            source=source,
            canary_pods=view.pods,
            revision=next_revision(round_.resource, written, time.time()),
        )
        if is_foreign(current) and not kill:
            message = f"someone else has written ConfigMap {name}: delete it to hand it back to the operator"
            round_.facts[Condition.DISTRIBUTED] = Fact(False, "ForeignEdit", message)
            return
        if is_foreign(current) or written is None or written.digest != document.digest:
            self._check_lead(round_)
            self._cluster.write_config_map(config_map_body(policy, document, current))
            log.info("%s: revision %d: mode %s", name, document.revision, document.mode)
            round_.document = document
        else:
            round_.document = written
        message = f"revision {round_.document.revision} in ConfigMap {name}"
        round_.facts[Condition.DISTRIBUTED] = Fact(True, "Written", message)

    @staticmethod
    def _check_lead(round_: Round) -> None:
        if not round_.leads():
            raise StaleWriteError("the Lease was lost during the round: nothing was written")

    def _report(self, round_: Round) -> None:
        """The status if it differs, then events for what has changed."""
        resource, document = round_.resource, round_.document
        old, generation = resource.get("status", {}), resource["metadata"]["generation"]
        conditions, changes = merge_conditions(
            old.get("conditions", []), round_.facts, generation=generation, now=datetime.now(UTC)
        )
        status: dict[str, Any] = {"observedGeneration": generation, "conditions": conditions}
        if document is not None:
            status["revision"] = document.revision
            status["effectiveMode"] = "off" if document.kill else document.mode
        elif "revision" in old:
            status["revision"] = old["revision"]
        if round_.canary is not None:
            status["canary"] = _canary_status(round_.canary, old.get("canary", {}), generation)
        if status == old:
            return
        self._check_lead(round_)
        self._cluster.write_status(resource, status)
        for change in changes:
            if change.is_event:
                fact, reason = change.fact, f"{change.condition.value}{change.fact.reason}"
                message = fact.message or fact.reason
                self._cluster.event(resource, warning=change.is_warning, reason=reason, message=message)
        if document is not None and status["effectiveMode"] != old.get("effectiveMode"):
            message = f"mode {status['effectiveMode']} since revision {document.revision}"
            self._cluster.event(resource, warning=document.kill, reason="ModeChanged", message=message)


def _canary_status(view: CanaryView, old: Mapping[str, Any], generation: int) -> dict[str, Any]:
    """The gates of a verdict stay as long as the verdict."""
    if view.state is not None:
        gates = gate_entries(view.state.results)
    else:
        gates = old.get("gates", []) if old.get("generation") == generation else []
    return {"generation": generation, "pods": list(view.pods), "gates": gates}
