"""A clock that moves when it is told to."""


class VirtualClock:
    """Seconds. Reading it never takes time."""

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
