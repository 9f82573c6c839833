"""What can go wrong in training that is not a wrong setting."""

from kvpilot.engine.errors import InputError, KVPilotError


class TrainingError(KVPilotError):
    """Training cannot go on; the message says what to do, and what was done so far is kept."""


class FolderError(TrainingError, InputError):
    """The folder that was named holds no training, or another one."""
