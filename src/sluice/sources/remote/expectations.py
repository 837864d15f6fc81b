"""Ranges of a file that are checked together with the data after them, so that they take no request of their own."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence

__all__ = ["Expectations"]

#: Most bytes by which a read begins earlier, to bring the range in front of the data.
_LEAD_BYTES = 64 << 10


class _Expected:
    """One range, and the data after it."""

    __slots__ = ("check", "data", "end", "met", "start", "used")

    def __init__(self, start: int, data: int, end: int, check: Callable[[bytes], None]) -> None:
        self.start, self.data, self.end, self.check = start, data, end, check
        #: Whether the check has passed, and whether some of the data was read.
        self.met = self.used = False


class Expectations:
    """Ranges of one file. Each thread may add and look; checks are called without a lock."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._by_start: dict[int, _Expected] = {}
        self._lock = threading.Lock()

    def add(self, offset: int, nbytes: int, data_bytes: int, check: Callable[[bytes], None]) -> None:
        """Add a range; one that begins at the same byte as an earlier one is the same. See ``CheckingSource``."""
        with self._lock:
            if offset not in self._by_start:
                self._by_start[offset] = _Expected(offset, offset + nbytes, offset + nbytes + data_bytes, check)
                insort(self._starts, offset)

    def lead(self, offset: int) -> int:
        """Return the bytes by which a read at ``offset`` should begin earlier; 0 for none."""
        if not self._starts:
            return 0
        with self._lock:
            found = self._among(offset, offset + 1)
        lead = offset - found[0].start if found and not found[0].met else 0
        return lead if lead <= _LEAD_BYTES else 0

    def look(self, first: int, end: int, part: Callable[[int, int], bytes]) -> None:
        """Check the ranges that a read has brought.

        Args:
            first: First byte of the read.
            end: First byte after it.
            part: Returns the bytes of a part of it, by offsets in the file.

        Raises:
            CheckpointError: A check refuses what it sees.
        """
        if not self._starts:
            return
        with self._lock:
            found = [each for each in self._among(first, end) if not each.met]
        for each in found:
            if first <= each.start and each.data <= end:
                each.check(part(each.start, each.data))
                each.met = True
            elif max(first, each.data) < min(end, each.end):
                each.used = True

    def left(self) -> list[tuple[int, int]]:
        """Return offset and size of the ranges that were not checked although data after them was read."""
        with self._lock:
            found = (self._by_start[start] for start in self._starts)
            return [(each.start, each.data - each.start) for each in found if each.used and not each.met]

    def _among(self, first: int, end: int) -> Sequence[_Expected]:
        """Return the ranges of which some bytes, or of whose data some, are from ``first`` to ``end``."""
        begin = max(0, bisect_right(self._starts, first) - 1)
        found = [self._by_start[start] for start in self._starts[begin : bisect_right(self._starts, end - 1)]]
        return [each for each in found if each.end > first]
