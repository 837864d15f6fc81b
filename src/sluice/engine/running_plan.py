"""Plans that are run: by a session, with what its threads and the caller exchange, and small ones by the caller."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from msgspec import Struct

from sluice import _defaults as defaults
from sluice._errors import ReadError
from sluice.engine.host_memory import HostMemory
from sluice.engine.staging import StagingBuffer, StagingPool
from sluice.engine.targets import Targets
from sluice.records import LoadPlan, Method, Read, requests_of
from sluice.sources.protocol import Source
from sluice.sources.wrappers import ended_early

if TYPE_CHECKING:
    from sluice.engine.session import Session

__all__ = ["FinishedRead", "RunResult", "RunningPlan", "SessionEndedError", "Surprise", "TargetMemory", "run_small"]

#: Most bytes of a buffer in the heap; malloc maps larger ones.
_HEAP_BYTES = 64 << 10

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
            SessionEndedError: The session has ended, or is that of the process that forked this one.
        """
        if self._process != os.getpid():
            raise SessionEndedError("the session is that of the parent process")
        pending = _Pending(self.plan) if completed or self.plan.most_unfinished_reads else None
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
            for number in self.plan.used_files:
                self._session.sources[number].check_unchanged()
        except BaseException:
            self._session.close()
            raise
        return RunResult(read_bytes=read_bytes, stepped_down=stepped_down, surprises=surprises)

    def abandon(self) -> None:
        """Finish the targets after the session's threads have ended; ``wait`` raises ``SessionEndedError``."""
        self.results.put(SessionEndedError("the session ended before this plan was run"))
        self.targets.finish()

    def _results(self) -> Iterator[FinishedRead]:
        """Yield the finished reads in the order in which they finish; raise the first failure instead."""
        for _ in self.plan.reads:
            _check_process(self._process)
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


class _Pending:
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


def _check_process(process: int) -> None:
    """Raise in the child of a fork, which has none of the threads."""
    if os.getpid() != process:
        raise ReadError("the process was forked during the load; only the parent can finish it")


def run_small(
    plan: LoadPlan,
    sources: Sequence[Source],
    targets: Targets,
    *,
    progress: Callable[[int], None] | None = None,
    completed: Callable[[int], None] | None = None,
) -> RunResult:
    """Fill every target of a ``LoadPlan.small`` plan; see ``RunningPlan.wait``."""
    total, process = 0, os.getpid()
    last = {position: read for read in plan.reads for position in read.targets} if completed else {}
    targets.begin()
    staging = _staging(plan)
    for read in plan.reads:
        source, first = sources[read.file], read.offset % defaults.BLOCK_BYTES
        if read.into is not None or not targets.read_straight(source, read):
            view = staging.view[first : first + read.nbytes]
            if read.into is not None:
                view = targets.window(read.into, read.into_offset, read.nbytes)
            found = source.read_into(read.offset, view)
            if found < read.nbytes:
                raise ended_early(source, read.offset, read.nbytes, found)
            if read.into is None:
                targets.copy_out(read, staging, first)
        total += read.nbytes
        if progress:
            progress(total)
            _check_process(process)
        if completed:
            for position in read.targets:
                if last[position] is read:
                    completed(position)
    for number in plan.used_files:
        sources[number].check_unchanged()
    return RunResult(read_bytes={"direct": 0, "buffered": total}, stepped_down=0, surprises={})


def _staging(plan: LoadPlan) -> StagingBuffer:
    """Return a buffer for the largest staged read."""
    room = max((read.nbytes for read in plan.reads if read.into is None), default=0) + defaults.BLOCK_BYTES
    if room <= _HEAP_BYTES:  # its pages are resident: their first touch takes longer than a small read
        return StagingBuffer(bytearray(room), 0, room)
    memory = HostMemory(room, huge_pages=plan.huge_staging)
    return StagingBuffer(memory.mapping, memory.start, room)
