"""What may become of a policy's wish. Pure functions; they shrink or hold a change, never enlarge or add one.

The one exception undoes: a step back returns, step by step, to knobs that had been in force. Every refusal carries a
reason code, which the controller counts and writes to the audit log. docs/reliability.md names each rule's test.
"""

from kvpilot.agent.guard.changes import constrain, towards
from kvpilot.agent.guard.limits import GuardLimits, Step, default_steps, intervals
from kvpilot.agent.guard.memory import Memory, Move, Watch
from kvpilot.agent.guard.observation import check_observation
from kvpilot.agent.guard.reasons import Reason, Refusal, Verdict
from kvpilot.agent.guard.review import Review, note_change, note_conflict, note_failure, note_success, review
from kvpilot.agent.guard.slo import SloLimits

__all__ = [
    "GuardLimits",
    "Memory",
    "Move",
    "Reason",
    "Refusal",
    "Review",
    "SloLimits",
    "Step",
    "Verdict",
    "Watch",
    "check_observation",
    "constrain",
    "default_steps",
    "intervals",
    "note_change",
    "note_conflict",
    "note_failure",
    "note_success",
    "review",
    "towards",
]
