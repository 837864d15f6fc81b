"""Time in which pauses between attempts take no time."""

from __future__ import annotations


class SkippedTime:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the clock."""
        self.now += seconds
        self.pauses.append(seconds)
