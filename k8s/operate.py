"""The operator's process: watches wake it, rounds run one after the other, Leases are renewed beside them."""

import logging
import os
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvpilot.engine.errors import ConfigError
from kvpilot.k8s.canary import Fetch
from kvpilot.k8s.cluster import Cluster
from kvpilot.k8s.errors import ClusterError
from kvpilot.k8s.lease import LeaseElector
from kvpilot.k8s.policy_resource import KIND, WORKLOAD_KINDS, SpecError, Target, parse_target
from kvpilot.k8s.reconcile import Reconciler

log = logging.getLogger(__name__)
SETTLE_SECONDS = 0.2  # after a wake-up: changes come in bunches


def unique_identity() -> str:
    """The pod's name if it is known, and something that a restarted process does not share."""
    return f"{os.environ.get('POD_NAME', os.uname().nodename)}_{uuid.uuid4().hex[:8]}"


@dataclass(frozen=True, kw_only=True)
class OperatorConfig:
    namespace: str
    identity: str = field(default_factory=unique_identity)
    resync_seconds: float = 5.0  # between two rounds if nothing wakes the operator
    lease_seconds: int = 15  # after so long without a sign of life another operator takes over

    def __post_init__(self) -> None:
        if not self.namespace:
            raise ConfigError("namespace='' is invalid: expected the namespace of the KVPolicies")
        if not 0.2 <= self.resync_seconds <= 300:
            raise ConfigError(
                f"resync_seconds={self.resync_seconds} is invalid: expected a number in [0.2, 300]"
            )
        if not 3 <= self.lease_seconds <= 300:
            raise ConfigError(
                f"lease_seconds={self.lease_seconds} is invalid: expected an integer in [3, 300]"
            )


class Operator:
    """Several may run; for each target the holder of its Lease acts."""

    def __init__(
        self, cluster: Cluster, config: OperatorConfig, *, fetch: Fetch, policy_names: Collection[str]
    ) -> None:
        self._cluster, self._config = cluster, config
        self._reconciler = Reconciler(cluster, fetch=fetch, policy_names=policy_names)
        self._electors: dict[Target, LeaseElector] = {}
        self._wake = threading.Event()
        self.last_round = time.monotonic()  # the end of the last one, whatever became of it

    def run(self, stop: threading.Event) -> None:
        """Until `stop` is set; gives the Leases back at the end. The control documents stay as they are."""
        threads = [
            threading.Thread(target=self._cluster.watch, args=(kind, self._wake.set, stop), daemon=True)
            for kind in (KIND, *WORKLOAD_KINDS)
        ]
        threads.append(threading.Thread(target=self._campaign, args=(stop,), daemon=True))
        for thread in threads:
            thread.start()
        while not stop.is_set():
            try:
                self.round()
            except ClusterError as error:
                log.warning("round: %s", error)
            self.last_round = time.monotonic()
            self._wake.wait(self._config.resync_seconds)
            self._wake.clear()
            stop.wait(SETTLE_SECONDS)
        for elector in list(self._electors.values()):
            elector.give_back()
        self._cluster.close()

    def interrupt(self) -> None:
        """Ends the wait between two rounds: call it after setting `stop`."""
        self._wake.set()

    def round(self) -> None:
        """Looks at every KVPolicy once; ClusterError if they cannot be listed."""
        resources = self._cluster.policies()
        by_target = _by_target(resources)
        self._stand_for(by_target)
        for target, claimants in by_target.items():
            elector = self._electors[target]
            for position, resource in enumerate(claimants):
                if elector.is_leader:
                    rivals = [claimants[0]["metadata"]["name"]] if position else []
                    self._reconcile(resource, rivals, elector)
        led = [target for target, elector in self._electors.items() if elector.is_leader]
        uids = {r["metadata"]["uid"] for target in led for r in by_target.get(target, ())}
        self._reconciler.forget_trials(uids)

    def _reconcile(self, resource: dict[str, Any], rivals: Sequence[str], elector: LeaseElector) -> None:
        try:
            now = time.monotonic()
            self._reconciler.reconcile(resource, rivals, leads=lambda: elector.is_leader, now=now)
        except ClusterError as error:
            log.warning("%s %s: %s", KIND, resource["metadata"]["name"], error)
        except Exception:  # one that trips a bug must not keep the others from being looked after
            log.exception("%s %s failed", KIND, resource["metadata"]["name"])

    def _stand_for(self, targets: Collection[Target]) -> None:
        """A candidate for each target, none for targets that are gone."""
        for target in self._electors.keys() - set(targets):
            self._electors.pop(target).give_back()
        for target in set(targets) - self._electors.keys():
            elector = LeaseElector(
                self._cluster,
                target.lease,
                self._config.identity,
                duration_seconds=self._config.lease_seconds,
            )
            elector.campaign()
            self._electors[target] = elector

    def _campaign(self, stop: threading.Event) -> None:
        while not stop.wait(self._config.lease_seconds / 5):
            for elector in list(self._electors.values()):
                led = elector.is_leader
                if elector.campaign() and not led:
                    self._wake.set()


def _by_target(resources: Sequence[Mapping[str, Any]]) -> dict[Target, list[dict[str, Any]]]:
    """Who claims which target, the oldest first: it has the right. One without a target is nobody's business."""
    found: dict[Target, list[dict[str, Any]]] = {}

    def age(resource: Mapping[str, Any]) -> tuple[str, str]:
        return resource["metadata"]["creationTimestamp"], resource["metadata"]["uid"]

    for resource in sorted(resources, key=age):
        try:
            found.setdefault(parse_target(resource), []).append(dict(resource))
        except SpecError as error:
            log.warning("%s %s: %s", KIND, resource["metadata"]["name"], error)
    return found
