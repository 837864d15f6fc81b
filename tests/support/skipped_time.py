"""Time in which pauses between attempts take no time."""

from __future__ import annotations

import time


class SkippedTime:
    """A clock that pauses move at once, and that runs besides."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self._skipped

    def sleep(self, seconds: float) -> None:
        """Move the clock."""
        self._skipped += seconds
