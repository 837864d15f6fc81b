"""Waiting for what has to come: on a busy machine it comes late, and a fixed time is either too short or too long."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

#: Longer than a starved process needs for anything; only a failure takes it.
PATIENCE_SECONDS = 90.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    """Return as soon as ``condition`` holds; fail if it never does.

    Args:
        condition: Is asked again and again.
        what: What does not happen, for the message.
    """
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"waited {PATIENCE_SECONDS:g} s in vain until {what}")
        time.sleep(0.001)
