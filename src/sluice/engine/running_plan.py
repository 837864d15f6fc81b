"""A plan that a session is running: what its threads and the caller exchange, and the methods of its reads."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from sluice import _defaults as defaults
from sluice._errors import ReadError
from sluice.engine.staging import StagingBuffer, StagingPool
from sluice.records import LoadPlan, Method, Read, requests_of
from sluice.sources.pages import FileWatch
from sluice.sources.protocol import Source, WatchableSource

if TYPE_CHECKING:
    from sluice.engine.session import Session

__all__ = [
    "FinishedRead",
    "Pending",
    "ReadMethods",
    "RunResult",
    "RunningPlan",
    "SessionEndedError",
    "Surprise",
    "TargetMemory",
    "check_process",
    "check_unchanged",
]

#: Reason for a buffered read where the plan prefers a direct one: another process reads the file, or the range was
#: cached meanwhile; empty if there is none.
Surprise = Literal["", "shared", "cached"]


class SessionEndedError(RuntimeError):
    """The session ended before this plan was run, because another plan failed or the session was closed."""


class TargetMemory(Protocol):
    """Where the bytes of a plan go: memory of the host and of devices, or a file under construction."""

    def map_files(self, sources: Sequence[Source]) -> None:
        """Map the ranges of files that the plan maps."""
        ...

    def begin(self, staging: StagingPool) -> None:
        """Prepare for copies out of ``staging``."""
        ...

    def window(self, position: int, offset: int, nbytes: int) -> memoryview:
        """Return memory of a target that is read into without staging, from ``offset`` on."""
        ...

    def copy_out(self, read: Read, buffer: StagingBuffer, first: int) -> None:
        """Copy what was read out of a staging buffer, in which it begins at byte ``first``; called from any thread."""
        ...

    def complete(self, position: int) -> None:
        """Finish a target whose last byte has arrived; called from the caller's thread."""
        ...

    def finish(self) -> None:
        """Return once every copy is done, whether the plan succeeded or not."""
        ...


class RunResult(Struct, frozen=True, kw_only=True):
    """The reads that a plan took."""

    #: Bytes read by each method.
    read_bytes: Mapping[str, int]
    #: Reads that used a later method because the preferred one failed.
    stepped_down: int
    #: Bytes that were read through the page cache although the plan prefers direct reads, by reason.
    surprises: Mapping[Surprise, int]


class FinishedRead(Struct, frozen=True):
    """A finished read, from a reader or copier to the caller's thread."""

    read: Read
    method: Method
    #: Reason for leaving out the preferred method.
    surprise: Surprise = ""


class RunningPlan:
    """A plan that a session has begun to run.

    Attributes:
        plan: What is done.
        targets: Where the bytes go.
        results: Finished reads, and the failure if there is one.
        has_reader: Whether a thread reads for it; without one the thread that waits does.
        staging: The buffers of its reads.
    """

    staging: StagingPool

    def __init__(self, session: Session, plan: LoadPlan, targets: TargetMemory) -> None:
        self.plan = plan
        self.targets = targets
        self.results: queue.SimpleQueue[FinishedRead | BaseException] = queue.SimpleQueue()
        self.has_reader = False
        self._session, self._process = session, os.getpid()
        self._requests = requests_of(plan.reads)
        self._take = threading.Lock()
        # One permit per read whose result may wait for the caller; without a bound there are none.
        self._permits: queue.SimpleQueue[None] | None = queue.SimpleQueue() if plan.most_unfinished_reads else None
        self.admit(plan.most_unfinished_reads)

    def admit(self, count: int) -> None:
        """Allow ``count`` more reads."""
        if self._permits is not None:
            for _ in range(count):
                self._permits.put(None)

    def next_reads(self) -> list[Read]:
        """Wait until the plan allows one more read, and take those of the next request in file order; none at the end.

        A plan that limits its unfinished reads has requests of one read each.
        """
        if self._permits is not None and self.has_reader:
            self._permits.get()
        with self._take:
            reads = next(self._requests, [])
        if not reads:
            self.admit(1)  # another reader may be waiting to find this out
        return reads

    def wait(
        self, *, progress: Callable[[int], None] | None = None, completed: Callable[[int], None] | None = None
    ) -> RunResult:
        """Return once every target is filled or mapped. If this raises, the session has ended.

        Args:
            progress: Called in this thread with the bytes read so far.
            completed: Called in this thread with the position of each target whose last byte has arrived.

        Raises:
            ReadError: The operating system failed a read.
            TruncatedError: A file is shorter than it was when it was indexed.
            SourceChangedError: A file is no longer the one that was indexed.
            SessionEndedError: The session has ended.
        """
        pending = Pending(self.plan) if completed or self.plan.most_unfinished_reads else None
        read_bytes: dict[str, int] = {"direct": 0, "buffered": 0}
        surprises: dict[Surprise, int] = {}
        stepped_down = total = 0
        try:
            for done in self._results():
                read_bytes[done.method] += done.read.nbytes
                if done.surprise:
                    surprises[done.surprise] = surprises.get(done.surprise, 0) + done.read.nbytes
                else:
                    stepped_down += done.method != done.read.methods[0]
                total += done.read.nbytes
                if progress:
                    progress(total)
                for position in pending.finished_by(done.read) if pending else ():
                    self.targets.complete(position)
                    if completed:
                        completed(position)
                self.admit(1)
            for position in pending.unread if pending else ():
                self.targets.complete(position)
            self.targets.finish()
            self._session.finished(self)
            check_unchanged(self.plan, self._session.sources)
        except BaseException:
            self._session.close()
            raise
        return RunResult(
            read_bytes=read_bytes,
            stepped_down=stepped_down,
            surprises=surprises,
        )

    def abandon(self) -> None:
        """Finish the targets after the session's threads have ended; ``wait`` raises ``SessionEndedError``."""
        self.results.put(SessionEndedError("the session ended before this plan was run"))
        self.targets.finish()

    def _results(self) -> Iterator[FinishedRead]:
        """Yield the finished reads in the order in which they finish; raise the first failure instead."""
        for _ in self.plan.reads:
            check_process(self._process)
            # An interrupt after a read was finished is a second result: its buffer may never have been returned.
            if not self.has_reader and self.results.empty():
                self._session.read_next(self)
            yield self._next_result()
        if not self.has_reader and not self.results.empty():
            self._next_result()

    def _next_result(self) -> FinishedRead:
        result = self.results.get()
        if isinstance(result, BaseException):
            raise result
        return result


class Pending:
    """Counts the reads that each target still waits for."""

    def __init__(self, plan: LoadPlan) -> None:
        self._left = [0] * len(plan.targets)
        for read in plan.reads:
            for position in read.targets:
                self._left[position] += 1
        targets = zip(plan.targets, self._left, strict=True)
        #: Positions of the targets with a finisher that no read fills.
        self.unread = [i for i, (target, left) in enumerate(targets) if target.finisher and not left]

    def finished_by(self, read: Read) -> Iterator[int]:
        """Count a finished read; yield the positions of the targets that are complete."""
        for position in read.targets:
            self._left[position] -= 1
            if self._left[position] == 0:
                yield position


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
