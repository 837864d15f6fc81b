"""The counter of work: exact, and it stops endless loops."""

from __future__ import annotations

import sys

import pytest

from support.work import at_most


def lines(count: int) -> None:
    for _ in range(count):
        pass


def test_lines_are_counted() -> None:
    with at_most(2020):
        lines(1000)
    with pytest.raises(pytest.fail.Exception, match="more than 1,990 steps"), at_most(1990):
        lines(1000)
    assert sys.gettrace() is None
