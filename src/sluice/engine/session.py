"""Runs plans: the threads that read and copy, and the staging buffers between them.

A ``Session`` keeps its threads and its staging until it ends, and runs any number of plans over the same sources, one
after the other; the reads of a plan that was started begin while the results of the one before are still being used. A
load is a session of one plan.

Readers take the reads of a plan in file order. While readers wait for a disk, copiers empty the buffers that they
fill: one copier per core, because more would all finish late and together, with no read under way. The engine decides
nothing but when to step down to the next permitted method of a read. The first failure ends the session: its threads
are joined, and every plan that was started fails.
"""

from __future__ import annotations

import queue
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from operator import attrgetter
from typing import TypeAlias

from sluice import _defaults as defaults
from sluice._errors import ReadError
from sluice._threads import Worker, join_threads, start_threads, stops_when
from sluice.engine.running_plan import FinishedRead, RunningPlan, SessionEndedError, Surprise, TargetMemory
from sluice.engine.staging import StagingBuffer, StagingPool
from sluice.engine.targets import Targets
from sluice.records import LoadPlan, Method, Read
from sluice.records.geometry import round_down, round_up
from sluice.sources.pages import FileWatch
from sluice.sources.protocol import DirectIOUnavailable, Source, WatchableSource, joins_reads
from sluice.sources.wrappers import ended_early

__all__ = ["ReadMethods", "Session"]

#: Share of the bytes from the first read of a file to its last from which on a plan reads all of them.
_WHOLE_SHARE = 0.75

#: A staging buffer that a reader has filled, for a copier.
_Filled: TypeAlias = tuple[RunningPlan, FinishedRead, StagingBuffer]


class Session:
    """Threads and staging buffers for plans over the same sources. No thread outlives it."""

    def __init__(self, sources: Sequence[Source]) -> None:
        """Start nothing and allocate nothing yet.

        Args:
            sources: The files of every plan, in their order.
        """
        self.sources = sources
        self._methods = ReadMethods(sources)
        self._readers: list[Worker] = []
        self._copiers: list[Worker] = []
        # A plan is in the first queue once for each reader that may work on it. None ends the threads of a queue.
        self._plans: queue.SimpleQueue[RunningPlan | None] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[_Filled | None] = queue.SimpleQueue()
        #: Buffers by their size in bytes.
        self._pools: dict[int, StagingPool] = {}
        self._running: list[RunningPlan] = []
        self.ended = False

    def start(self, plan: LoadPlan, targets: TargetMemory) -> RunningPlan:
        """Begin to run a plan, after those that were started before it; ``RunningPlan.wait`` completes it.

        A plan with finishers must be waited for before any plan that was started after it, because its readers wait for
        the caller.
        """
        if self.ended:
            raise SessionEndedError("the session has ended")
        run = RunningPlan(self, plan, targets)
        try:
            targets.map_files(self.sources)
            run.staging = self._staging_for(plan)
            self._running.append(run)
            targets.begin(run.staging)
            readers = min(plan.readers, len(plan.reads))
            start_threads(self._copiers, plan.copiers - len(self._copiers), self._copy, "sluice-copier")
            start_threads(self._readers, readers - len(self._readers), self._read, "sluice-reader")
            for _ in range(min(readers, len(self._readers))):
                run.has_reader = True
                self._plans.put(run)
        except BaseException:
            self.close()
            raise
        return run

    def release_staging(self) -> None:
        """Free the staging buffers; the next plan allocates its own. No plan may be running."""
        assert not self._running
        while self._pools:
            self._pools.popitem()[1].close()

    def close(self) -> None:
        """Stop and join the threads, and finish the targets of plans that were not waited for."""
        self.ended = True
        try:
            self._plans.put(None)
            for run in self._running:
                run.admit(len(self._readers))
            join_threads(self._readers)
        finally:
            try:
                if not any(reader.unfinished for reader in self._readers):
                    self._filled.put(None)
                    join_threads(self._copiers)
            finally:
                self._abandon_plans()

    def _abandon_plans(self) -> None:
        if any(thread.unfinished for thread in (*self._readers, *self._copiers)):
            return  # an interrupt came before they were joined: the next call to ``close`` does it
        running, self._running = self._running, []
        try:
            with ExitStack() as stack:  # in reverse order, each even if another raises
                for run in running:
                    stack.callback(run.abandon)
        finally:
            try:
                self._methods.close()
            finally:
                self.release_staging()

    def finished(self, run: RunningPlan) -> None:
        """Forget a plan that was waited for; a session that has ended has forgotten it already."""
        if run in self._running:
            self._running.remove(run)
            if not self._running:
                self._methods.close()

    def _staging_for(self, plan: LoadPlan) -> StagingPool:
        size = plan.staging_buffer_bytes
        pool = self._pools.get(size)
        if pool is None or (plan.huge_staging and not pool.huge_pages and not self._running):
            if not self._running:
                self.release_staging()
            self._pools[size] = StagingPool(buffer_bytes=size, count=0, huge_pages=plan.huge_staging)
        self._pools[size].grow_to(plan.staging_buffers)
        return self._pools[size]

    def _read(self) -> None:
        """Work on plans until the session ends; the work of a reader."""
        stops_when(lambda: self.ended)
        while (run := self._plans.get()) is not None:
            while self.read_next(run):
                pass
            del run  # its targets may be large, and the next plan long in coming
        self._plans.put(None)  # for the other readers

    def read_next(self, run: RunningPlan) -> bool:
        """Do the reads of the next request of a plan; return whether there may be another one."""
        try:
            reads = run.next_reads()
            with self._requested(reads) as source:
                for read in reads:
                    if self.ended:
                        return False
                    if read.into is not None:
                        run.results.put(self._read_in_place(run, source, read, read.into))
                    else:
                        self._read_staged(run, source, read)
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            run.results.put(error)
            return False
        return bool(reads)

    def _requested(self, reads: Sequence[Read]) -> AbstractContextManager[Source]:
        """Return the source of the reads of one request."""
        source = self.sources[reads[0].file if reads else 0]
        if len(reads) > 1 and joins_reads(source):
            first = reads[0].offset
            return source.request(first, reads[-1].offset + reads[-1].nbytes - first)
        return nullcontext(source)

    def _read_staged(self, run: RunningPlan, source: Source, read: Read) -> None:
        targets, kept = run.targets, read.methods[0] == "buffered" and not run.plan.drop_behind
        if kept and isinstance(targets, Targets) and targets.read_straight(source, read):
            run.results.put(FinishedRead(read, "buffered"))
            return
        first = read.offset % defaults.BLOCK_BYTES
        buffer = run.staging.borrow()
        try:
            done = self._fetch(
                run, source, read, lambda start, nbytes: buffer.view[start + first : start + first + nbytes]
            )
        except BaseException:
            run.staging.give_back(buffer)
            raise
        filled = run, done, buffer
        if self._copiers and run.plan.copiers:
            self._filled.put(filled)
        else:
            self._empty(*filled)

    def _copy(self) -> None:
        """Empty the buffers that readers have filled; the work of a copier. It ends after the readers have."""
        while (filled := self._filled.get()) is not None:
            self._empty(*filled)
            del filled
        self._filled.put(None)  # for the other copiers

    def _empty(self, run: RunningPlan, done: FinishedRead, buffer: StagingBuffer) -> None:
        """Copy the content of a buffer to its targets, and return the buffer, also on failure."""
        read = done.read
        try:
            if self.ended:
                return
            run.targets.copy_out(read, buffer, read.offset % defaults.BLOCK_BYTES)
            run.results.put(done)
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            run.results.put(error)
        finally:
            run.staging.give_back(buffer)

    def _read_in_place(self, run: RunningPlan, source: Source, read: Read, position: int) -> FinishedRead:
        return self._fetch(
            run, source, read, lambda start, nbytes: run.targets.window(position, read.into_offset + start, nbytes)
        )

    def _fetch(
        self, run: RunningPlan, source: Source, read: Read, window: Callable[[int, int], memoryview]
    ) -> FinishedRead:
        """Read a range by the first permitted method that the file system accepts.

        Args:
            run: The plan that it belongs to.
            source: The file, or the open request for this part of it.
            read: The range.
            window: Returns memory for ``nbytes`` bytes from ``start``, counted from the range's first byte.
        """
        methods, surprise = self._methods.of(run.plan, read)
        for method in methods:
            first, last = read.offset, read.offset + read.nbytes
            if method == "direct":
                first, last = round_down(first, defaults.BLOCK_BYTES), round_up(last, defaults.BLOCK_BYTES)
            try:
                found = source.read_into(first, window(first - read.offset, last - first), direct=method == "direct")
            except DirectIOUnavailable:
                continue
            if first + found < read.offset + read.nbytes:
                raise ended_early(source, read.offset, read.nbytes, first + found - read.offset)
            if method == "buffered" and run.plan.drop_behind:
                source.forget(read.offset, read.nbytes)
            return FinishedRead(read, method, surprise)
        raise ReadError("no permitted method can read this range", file=source.path, offset=read.offset)


class ReadMethods:
    """The choice between direct and buffered when a read starts, from what changed since the plan.

    A plan permits methods; this only steps down. A direct read leaves nothing in the page cache, so that of several
    processes each fetches the file from the disk; buffered reads fetch it once for all. And a range that another
    process has read into the cache meanwhile is copied from there. Files are marked while plans of a session read them.

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
            watch = self._watch(plan, read.file)
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

    def _watch(self, plan: LoadPlan, file: int) -> FileWatch | None:
        if file not in self._watches:
            source = self._sources[file]
            if len(self._watches) >= defaults.MOST_WAITING_READERS:  # more files than readers
                self._close_first()
            self._watches[file] = source.watch(_part(plan, file)) if isinstance(source, WatchableSource) else None
        return self._watches[file]

    def _close_first(self) -> None:
        watch = self._watches.pop(next(iter(self._watches)))
        if watch is not None:
            watch.close()


def _part(plan: LoadPlan, file: int) -> int:
    """Return what stands for the part of a file that a plan reads: 0 without large gaps, else its largest read.

    Ranks that read different parts of each tensor have nothing to share, unlike those that read the same ones.
    """
    first, end = (cut(plan.reads, file, key=attrgetter("file")) for cut in (bisect_left, bisect_right))
    reads = plan.reads[first:end]
    between = reads[-1].offset + reads[-1].nbytes - reads[0].offset
    if sum(read.nbytes for read in reads) >= _WHOLE_SHARE * between:
        return 0
    return 1 + max(reads, key=attrgetter("nbytes")).offset
