"""The counter of work: exact, and it stops endless loops."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from support.work import at_most, functions_entered


def lines(count: int) -> None:
    for _ in range(count):
        pass


def test_lines_are_counted() -> None:
    with at_most(2020):
        lines(1000)
    with pytest.raises(pytest.fail.Exception, match="more than 1,990 steps"), at_most(1990):
        lines(1000)
    assert sys.gettrace() is None


def test_what_never_ends_is_ended() -> None:
    with pytest.raises(pytest.fail.Exception), at_most(1000):
        lines(sys.maxsize)


def test_functions_of_a_folder_are_counted() -> None:
    with functions_entered(Path(__file__).parent) as entered:
        lines(3)
        sorted("ba")
    assert ("test_work.py", "lines") in entered
    assert sys.getprofile() is None
