"""The union of the ranges that many ranks read of a file."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["covered_bytes"]


def covered_bytes(ranges: Iterable[tuple[int, int]]) -> int:
    """Return the number of bytes that lie in at least one of the ranges ``(start, stop)``."""
    covered = end = 0
    for start, stop in sorted(ranges):
        covered += max(0, stop - max(start, end))
        end = max(end, stop)
    return covered
