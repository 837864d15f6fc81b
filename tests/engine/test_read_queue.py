"""The order in which readers take the reads of a plan."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sluice.engine.read_queue import ReadQueue
from sluice.planning.planner import plan_load
from sluice.records import LoadPlan, Read
from support.plans import FILE, facts


def plan_of(cached: str, most: int) -> LoadPlan:
    """Return a plan with one read per letter, ``c`` for a cached range, with its position as the offset."""
    reads = tuple(
        Read(file=0, offset=i, nbytes=1, methods=("buffered",), cached=letter == "c") for i, letter in enumerate(cached)
    )
    return replace(plan_load([], (FILE,), facts(), staging_bytes=1 << 20), reads=reads, most_cached_reads=most)


def test_at_most_so_many_cached_ranges_are_read_at_once() -> None:
    queue = ReadQueue(plan_of("ccccdd", 2))
    taken = [queue.take() for _ in range(5)]
    assert [read and read.offset for read in taken] == [0, 1, 4, 5, None]
    assert taken[0] is not None
    queue.done(taken[0])
    third = queue.take()
    assert third is not None
    assert third.offset == 2
    assert queue.take() is None  # the readers at work take the last one


@pytest.mark.parametrize("cached", ["cdcd", "cccc", "dddd"])
def test_without_a_limit_reads_are_taken_in_file_order(cached: str) -> None:
    queue = ReadQueue(plan_of(cached, 0))
    assert [getattr(queue.take(), "offset", None) for _ in range(5)] == [0, 1, 2, 3, None]
