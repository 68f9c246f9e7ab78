"""A clock that a test moves."""


class Clock:
    """Seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now
