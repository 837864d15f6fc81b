"""The choice between direct and buffered when a read starts, from what changed since the plan.

The plan permits methods; this only steps down. A direct read leaves nothing in the page cache, so that of several
processes each fetches the file from the disk; buffered reads fetch it once for all. And a range that another process
has read into the cache meanwhile is copied from there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Literal

from sluice import _defaults as defaults
from sluice._errors import ReadError
from sluice.records import LoadPlan, Method, Read
from sluice.sources.pages import FileWatch
from sluice.sources.protocol import Source, WatchableSource

__all__ = ["ReadMethods", "Surprise", "check_process", "check_unchanged"]

#: Reason for a buffered read where the plan prefers a direct one: another process reads the file, or the range was
#: cached meanwhile; empty if there is none.
Surprise = Literal["", "shared", "cached"]


def check_process(process: int) -> None:
    """Raise in the child of a fork, which has none of the threads."""
    if os.getpid() != process:
        raise ReadError("the process was forked during the load; only the parent can finish it")


def check_unchanged(plan: LoadPlan, sources: Sequence[Source]) -> None:
    """Raise if a file that a plan read or mapped has changed."""
    # Only those files: a slice needs none of the other shards, and checking one can take a round trip.
    for number in sorted({read.file for read in plan.reads} | {each.file for each in plan.mapped_ranges}):
        sources[number].check_unchanged()


class ReadMethods:
    """The methods of the reads of a session. Files are marked while plans read them; called from any thread.

    Plans of one session share the marks: with marks of their own, they would take each other for other processes.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._lock = threading.Lock()
        #: Marks by file, None for one that cannot be watched. Reads go through the files in order.
        self._watches: dict[int, FileWatch | None] = {}

    def of(self, plan: LoadPlan, read: Read) -> tuple[tuple[Method, ...], Surprise]:
        """Return the methods to try for a read of a plan, in order, and the reason if the preferred one is left out."""
        if not plan.joins_readers or read.methods != ("direct", "buffered"):
            return read.methods, ""
        with self._lock:
            watch = self._watch(read.file)
            if watch is not None and watch.cached_share(read.offset, read.nbytes) >= defaults.CACHED_SHARE:
                return ("buffered",), "cached"
            if watch is not None and watch.others_read():
                return ("buffered",), "shared"
        return read.methods, ""

    def close(self) -> None:
        """Remove the marks; called when no plan is running."""
        with self._lock:
            while self._watches:
                self._close_first()

    def _watch(self, file: int) -> FileWatch | None:
        if file not in self._watches:
            source = self._sources[file]
            if len(self._watches) >= defaults.MOST_WAITING_READERS:  # more files than readers
                self._close_first()
            self._watches[file] = source.watch() if isinstance(source, WatchableSource) else None
        return self._watches[file]

    def _close_first(self) -> None:
        watch = self._watches.pop(next(iter(self._watches)))
        if watch is not None:
            watch.close()
