"""One tree of errors. Everything a user can cause ends here; bugs of ours stay AssertionError."""


class KVPilotError(Exception):
    """Base of all errors that kvpilot raises on purpose."""


class InputError(KVPilotError):
    """What the user named cannot be used: an option, a setting, a file. The command line then exits with 2, not 1."""


class ConfigError(InputError, ValueError):
    """A configuration value is out of bounds; the message names field, value and bounds."""


class ModelError(InputError):
    """A model cannot be found, fetched or read."""


class RequestError(KVPilotError, ValueError):
    """A request is malformed or larger than the engine can ever serve (HTTP 400)."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class EngineFullError(KVPilotError):
    """The waiting queue is full (HTTP 429); try again after `retry_after_seconds`."""

    def __init__(self, message: str, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineClosedError(KVPilotError):
    """The engine is draining or has stopped (HTTP 503)."""


class KnobInvalidError(InputError, ValueError):
    """A knob value is refused (HTTP 422); nothing was applied."""

    def __init__(self, field: str, value: object, bounds: str) -> None:
        super().__init__(f"{field}={value!r} is invalid: expected {bounds}")
        self.field = field
        self.value = value
        self.bounds = bounds


class KnobStaleError(KVPilotError):
    """`expected_revision` is not the current revision (HTTP 409); nothing was applied."""

    def __init__(self, expected: int, current: int) -> None:
        super().__init__(f"expected_revision={expected} is stale: the current revision is {current}")
        self.expected = expected
        self.current = current


class PoolIntegrityError(KVPilotError):
    """The pool's books do not balance; the message holds all numbers involved."""
