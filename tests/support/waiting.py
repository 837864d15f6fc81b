"""Waiting for a condition: on a busy machine any fixed time is either too short or too long."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

#: Seconds until a wait fails: longer than any wait of a passing test on a busy machine.
PATIENCE_SECONDS = 90.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return as soon as ``condition`` holds; fail if it never does.

    Args:
        condition: Called repeatedly until it returns True.
        what: Description of the condition, for the error message.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"timed out after {PATIENCE_SECONDS:g} s: {what}")
        time.sleep(0.001)


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
