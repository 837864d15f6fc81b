"""The order in which the readers of a plan take its reads."""

from __future__ import annotations

import threading
from collections import deque

from sluice.records import LoadPlan, Read

__all__ = ["ReadQueue"]


class ReadQueue:
    """Reads of a plan in file order; cached ranges and others are two queues if the plan limits the cached ones.

    A read of a cached range is a copy that occupies a core, and more of them than cores are slower together. The other
    readers wait for the disk meanwhile. Called from any thread.
    """

    def __init__(self, plan: LoadPlan) -> None:
        self._most_cached = plan.most_cached_reads
        self._lock = threading.Lock()
        self._cached = deque(read for read in plan.reads if self._most_cached and read.cached)
        self._others = deque(read for read in plan.reads if not (self._most_cached and read.cached))
        self._copying = 0

    def take(self) -> Read | None:
        """Return the next read; None if there is none for this reader: those at work take what remains."""
        with self._lock:
            if self._cached and self._copying < self._most_cached:
                self._copying += 1
                return self._cached.popleft()
            return self._others.popleft() if self._others else None

    def done(self, read: Read) -> None:
        """Note the end of a read that was taken, before its reader takes the next."""
        if self._most_cached and read.cached:
            with self._lock:
                self._copying -= 1
