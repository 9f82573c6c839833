"""Whether a decision may rest on an observation at all."""

import math

from kvpilot.agent.guard.limits import GuardLimits
from kvpilot.agent.guard.reasons import Reason, Refusal
from kvpilot.env.observation import REQUIRED, Observation

SHARES = ("live_share", "retained_share", "free_share", "hit_rate", "slo_violation_share")
ROUNDING = 1e-6
CLOCK_SLACK_SECONDS = 1.0  # two clocks do not tick alike


def check_observation(
    observation: Observation, *, windows_seen: int, now: float, limits: GuardLimits
) -> list[Refusal]:
    """Why no decision may rest on this observation (empty: it may). `now` is on the observation's clock."""
    refusals: list[Refusal] = []

    def refuse(reason: Reason, detail: str) -> None:
        refusals.append(Refusal(reason, None, detail))

    if observation.reset:
        refuse(Reason.RESET, "a counter went down: the engine restarted")
    if windows_seen < limits.min_windows:
        refuse(Reason.WARMUP, f"{windows_seen} of {limits.min_windows} observations")
    for name in REQUIRED:
        value = getattr(observation, name)
        if value is None:
            refuse(Reason.MISSING, name)
        elif not math.isfinite(value) or value < 0:
            refuse(Reason.NOT_FINITE, f"{name} is {value!r}")
    for name in SHARES:
        value = getattr(observation, name)
        least = -math.inf if name in REQUIRED else -ROUNDING  # below zero is refused above
        if value is not None and math.isfinite(value) and not least <= value <= 1 + ROUNDING:
            refuse(Reason.IMPLAUSIBLE, f"{name} is {value:g}, a share lies in [0, 1]")
    age = now - observation.time
    if not -CLOCK_SLACK_SECONDS <= age <= limits.max_age_seconds:
        refuse(Reason.STALE, f"{age:.1f} s old, allowed {limits.max_age_seconds:g} s")
    if not 0 < observation.seconds <= limits.max_window_seconds:
        refuse(Reason.WINDOW, f"{observation.seconds:.1f} s, allowed (0, {limits.max_window_seconds:g}] s")
    if observation.idle and (observation.running or observation.waiting):
        refuse(Reason.FROZEN, "requests are under way and no series moved")
    return refusals
