"""The interface between scheduling and computing."""

from typing import Protocol

from kvpilot.engine.request import SampledToken, ScheduledRequest


class Runner(Protocol):
    """Computes one step. K and V of every scheduled token are written to `request.pages`, whose cells the
    pool has allocated; pages before `start` are read at whatever precision they have now."""

    def execute(self, batch: list[ScheduledRequest]) -> list[SampledToken | None]:
        """One entry per scheduled request, None where `samples` is false."""
        ...
