"""Count the work of code: tests limit it in place of seconds, which depend on the machine and its load."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest


@contextmanager
def at_most(steps: int) -> Iterator[None]:
    """Fail as soon as this thread has run more than this number of lines of Python in the block.

    The count is the same on a busy and an idle machine. A call into C counts as one line: a hang there is ended by the
    suite's time limit. Limits have a margin for other versions of Python and for imports.
    """
    left = steps

    def count(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:  # while the work runs: otherwise a missing refusal could take hours
            pytest.fail(f"the work takes more than {steps:,} steps")
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def functions_entered(below: Path) -> Iterator[set[tuple[str, str]]]:
    """Collect the functions of the files below a folder that this thread enters in the block: file and name of each."""
    entered: set[tuple[str, str]] = set()
    folder = f"{below}/"

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(folder):
            entered.add((frame.f_code.co_filename.removeprefix(folder), frame.f_code.co_qualname))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(before)
