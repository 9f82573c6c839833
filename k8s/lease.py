"""Who may act for a target: the holder of its Lease. Never two, whatever the wall clocks say.

A holder trusts its Lease for two thirds of the duration since it *began* the last successful renewal. Another takes
the Lease over only after it has itself watched it unchanged for the whole duration. Only elapsed time on
each machine's own clock counts, so the two periods cannot overlap.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from kvpilot.k8s.errors import ClusterError, StaleWriteError

log = logging.getLogger(__name__)
TRUSTED_SHARE = 2 / 3  # of the duration: how long a holder acts without having renewed


@dataclass(frozen=True, kw_only=True)
class LeaseRecord:
    holder: str  # empty: given back
    duration_seconds: int
    transitions: int  # how often the holder has changed
    resource_version: str  # of the object read; empty: there is none yet


class LeaseStore(Protocol):
    """Where Leases live. `write` creates or replaces exactly the version that was read, or StaleWriteError."""

    def read_lease(self, name: str) -> LeaseRecord | None: ...

    def write_lease(self, name: str, record: LeaseRecord) -> LeaseRecord: ...


class LeaseElector:
    """One candidate for one Lease. `campaign` may be called from one thread, `is_leader` from any."""

    def __init__(
        self,
        store: LeaseStore,
        name: str,
        identity: str,
        *,
        duration_seconds: int = 15,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name, self.identity, self.duration_seconds = name, identity, duration_seconds
        self._store, self._clock = store, clock
        self._lock = threading.Lock()
        self._trusted_until = -math.inf
        self._seen: tuple[str, str] | None = None  # holder and version of the record last seen ...
        self._seen_since = math.inf  # ... and since when it has not changed

    @property
    def is_leader(self) -> bool:
        return self._clock() < self._trusted_until

    def campaign(self) -> bool:
        """Takes, renews or watches the Lease; returns `is_leader`. A failing API server only costs trust."""
        with self._lock:
            try:
                self._campaign()
            except StaleWriteError:
                self._trusted_until = -math.inf  # someone else wrote: look again next time
            except ClusterError as error:
                log.warning("lease %s: %s", self.name, error)
            return self.is_leader

    def give_back(self) -> None:
        """Stops leading at once and lets another one begin at once."""
        with self._lock:
            led, self._trusted_until = self.is_leader, -math.inf
            if not led:
                return
            try:
                record = self._store.read_lease(self.name)
                if record is not None and record.holder == self.identity:
                    self._store.write_lease(self.name, replace(record, holder=""))
            except ClusterError as error:
                log.warning("lease %s was not given back and will expire: %s", self.name, error)

    def _campaign(self) -> None:
        began = self._clock()
        record = self._store.read_lease(self.name)
        if record is not None:
            self._watch(record)
        if not self._may_take(record):
            self._trusted_until = -math.inf
            return
        mine = self._store.write_lease(self.name, self._claim(record))
        self._watch(mine)
        if not self.is_leader:
            log.info("lease %s: %s leads (change %d)", self.name, self.identity, mine.transitions)
        self._trusted_until = began + TRUSTED_SHARE * self.duration_seconds

    def _watch(self, record: LeaseRecord) -> None:
        seen = (record.holder, record.resource_version)
        if seen != self._seen:
            self._seen, self._seen_since = seen, self._clock()

    def _may_take(self, record: LeaseRecord | None) -> bool:
        if record is None or record.holder in ("", self.identity):
            return True
        return self._clock() - self._seen_since > max(record.duration_seconds, self.duration_seconds)

    def _claim(self, record: LeaseRecord | None) -> LeaseRecord:
        changed = record is not None and record.holder != self.identity
        return LeaseRecord(
            holder=self.identity,
            duration_seconds=self.duration_seconds,
            transitions=(record.transitions if record else 0) + changed,
            resource_version=record.resource_version if record else "",
        )
