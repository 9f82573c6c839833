"""What is in force: the settings, with what the control document says instead."""

from kvpilot.agent.control.config import RunSettings
from kvpilot.agent.guard import GuardLimits, SloLimits, intervals
from kvpilot.k8s.control_document import ControlDocument

DECISION_SECONDS = 60.0


def decide_every(interval_seconds: float, decision_seconds: float) -> int:
    """Observations per decision."""
    return max(round(decision_seconds / interval_seconds), 1)


def guard_limits(
    settings: RunSettings, document: ControlDocument | None = None, trained_seconds: float | None = None
) -> GuardLimits:
    """The settings, with what the control document says instead; `trained_seconds` as for `paces`."""
    guard, slo = settings.guard, settings.slo.model_dump()
    interval, decision = paces(settings, document, trained_seconds)
    change, settle, reverts = guard.min_change_seconds, guard.settle_seconds, guard.max_reverts_per_hour
    budget = guard.quality_loss_budget
    if document is not None:
        given = document.limits
        change = change if given.min_change_seconds is None else float(given.min_change_seconds)
        settle = settle if given.settle_seconds is None else float(given.settle_seconds)
        reverts = reverts if given.max_reverts_per_hour is None else given.max_reverts_per_hour
        slo |= _slo_of(document)
        micronats = document.slo.quality_loss_micronats
        budget = budget if micronats is None else micronats / 1e6
    return GuardLimits(
        max_age_seconds=3 * interval + settings.timeout_seconds,
        max_window_seconds=max(300.0, 3 * decision),
        min_interval_seconds=intervals(change),
        budget_steps_per_minute=guard.budget_steps_per_minute,
        max_flips=guard.max_flips,
        flip_seconds=guard.flip_seconds,
        quality_loss_budget=budget,
        slo=SloLimits(**slo),
        settle_seconds=settle,
        reuse_seconds=guard.reuse_seconds,
        blame_seconds=guard.blame_seconds,
        max_reverts_per_hour=reverts,
        freeze_seconds=guard.freeze_seconds,
        max_failures=guard.max_failures,
        breaker_seconds=guard.breaker_seconds,
    )


def asked_decision_seconds(settings: RunSettings, document: ControlDocument | None = None) -> float | None:
    """As the document or the settings say; None where neither does."""
    given = None if document is None else document.limits.decision_seconds
    return settings.decision_seconds if given is None else float(given)


def paces(
    settings: RunSettings, document: ControlDocument | None = None, trained_seconds: float | None = None
) -> tuple[float, float]:
    """Seconds between two observations and between two decisions. `trained_seconds` is the interval that the policy
    was trained on, if any: it counts where none is asked for."""
    given = None if document is None else document.limits
    interval = (
        settings.interval_seconds
        if given is None or given.interval_seconds is None
        else given.interval_seconds
    )
    decision = asked_decision_seconds(settings, document) or trained_seconds or DECISION_SECONDS
    return float(interval), float(max(decision, interval))


def _slo_of(document: ControlDocument) -> dict[str, float]:
    slo = document.slo
    in_thousandths = {
        "ttft_p99_seconds": slo.ttft_p99_milliseconds,
        "inter_token_p99_seconds": slo.inter_token_p99_milliseconds,
        "queue_p99_seconds": slo.queue_p99_milliseconds,
        "violation_share": slo.violation_permille,
    }
    return {name: value / 1000 for name, value in in_thousandths.items() if value is not None}
