"""Work, counted: what tests of effort ask for in place of seconds, which depend on the machine and its other users."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import pytest


@contextmanager
def at_most(steps: int) -> Iterator[None]:
    """Fail as soon as this thread has run more than so many lines of Python in the block.

    They are as many on a busy machine as on an idle one. A call into C counts as one: effort hidden there shows as a
    hang, which the suite's time limit ends. Limits leave room for other versions of Python, and for imports.
    """
    left = steps

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:  # in the midst of the work: what should be refused soon could otherwise take hours
            pytest.fail(f"the work takes more than {steps:,} steps")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)
