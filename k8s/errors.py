"""What can go wrong between the operator and the cluster."""

from kvpilot.engine.errors import KVPilotError


class ClusterError(KVPilotError):
    """The API server does not answer, or refuses; the message says what was asked. Worth another try later."""


class StaleWriteError(ClusterError):
    """Someone else wrote first; nothing was written."""
