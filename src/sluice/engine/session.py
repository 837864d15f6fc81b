"""Runs a plan: the only module that starts threads. It decides nothing but when to step down to the next method."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from sluice import _options as options
from sluice._errors import ReadError, TruncatedError
from sluice._geometry import round_down, round_up
from sluice._threads import Worker, join_threads, start_threads
from sluice.engine.staging import StagingBuffer, StagingPool
from sluice.records import LoadPlan, Method, Read
from sluice.sources.protocol import DirectIOUnavailable, Source

__all__ = ["Outcome", "TargetMemory", "execute"]


class TargetMemory(Protocol):
    """Where the bytes of a plan go: memory of the host and of devices, or a file under construction."""

    def map_files(self, sources: Sequence[Source]) -> None:
        """Map the ranges of files that the plan wants mapped."""
        ...

    def begin(self, staging: StagingPool) -> None:
        """Prepare for copies out of ``staging``."""
        ...

    def window(self, position: int, offset: int, nbytes: int) -> memoryview:
        """Return memory of a target that is read into without staging, from ``offset`` on."""
        ...

    def copy_out(self, read: Read, buffer: StagingBuffer, first: int) -> None:
        """Copy what was read out of a staging buffer, where it begins at byte ``first``; called from any thread."""
        ...

    def finish(self) -> None:
        """Return once every copy is done, whether the plan succeeded or not."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the engine did."""

    #: Seconds from the first read to the last copy.
    seconds: float
    #: Bytes read by each method.
    read_bytes: Mapping[str, int]
    #: Reads that had to use a later method than the plan preferred.
    stepped_down: int


@dataclass(frozen=True, slots=True)
class _Done:
    """One finished read, from a reader to the caller's thread."""

    read: Read
    method: Method


def execute(
    plan: LoadPlan,
    sources: Sequence[Source],
    targets: TargetMemory,
    *,
    progress: Callable[[int], None] | None = None,
    completed: Callable[[int], None] | None = None,
) -> Outcome:
    """Fill or map every target of the plan.

    The first failure stops all readers, which are joined before it is raised. So are they when the caller is
    interrupted or a callback raises.

    Args:
        plan: What to do.
        sources: The files of the plan, in its order.
        targets: Where the bytes go.
        progress: Called in this thread with the bytes read so far.
        completed: Called in this thread with the position of each target whose last byte has arrived.

    Raises:
        ReadError: The operating system failed a read.
        TruncatedError: A file is shorter than it was when it was indexed.
        SourceChangedError: A file is no longer the one that was indexed.
    """
    started = time.perf_counter()
    crew = _Crew(plan, sources, targets)
    pending = _Pending(plan) if completed else None
    read_bytes: dict[str, int] = {"direct": 0, "buffered": 0}
    stepped_down = total = 0
    targets.map_files(sources)
    with crew.working():
        for done in crew.results(len(plan.reads)):
            read_bytes[done.method] += done.read.nbytes
            stepped_down += done.method != done.read.methods[0]
            total += done.read.nbytes
            if progress:
                progress(total)
            if completed and pending:
                for position in pending.finished_by(done.read):
                    completed(position)
    # Only what was read or mapped: a slice asks nothing of the other shards, and asking can take a round trip.
    for number in sorted({fill.file for target in plan.targets for fill in target.fills}):
        sources[number].check_unchanged()
    return Outcome(seconds=time.perf_counter() - started, read_bytes=read_bytes, stepped_down=stepped_down)


class _Pending:
    """Counts the reads that each target still waits for."""

    def __init__(self, plan: LoadPlan) -> None:
        self._left = [0] * len(plan.targets)
        for read in plan.reads:
            for position in _positions(read):
                self._left[position] += 1

    def finished_by(self, read: Read) -> Iterator[int]:
        for position in _positions(read):
            self._left[position] -= 1
            if self._left[position] == 0:
                yield position


def _positions(read: Read) -> Iterator[int]:
    if read.into is not None:
        yield read.into
    yield from (copy.target for copy in read.copies)


@dataclass(frozen=True, slots=True)
class _Filled:
    """A staging buffer that a reader has filled, for a copier."""

    done: _Done
    buffer: StagingBuffer


class _Crew:
    """The threads of one plan.

    Each reader takes the next read, in file order, until none is left or one has failed. While readers wait for a
    disk, copiers empty the buffers: one for each core, because more of them would all finish late and together, with
    no read under way meanwhile.
    """

    def __init__(self, plan: LoadPlan, sources: Sequence[Source], targets: TargetMemory) -> None:
        self._plan = plan
        self._sources = sources
        self._targets = targets
        self._staging = StagingPool(
            buffer_bytes=plan.staging_buffer_bytes,
            count=plan.staging_buffers,
            huge_pages=plan.facts.huge_pages,
        )
        self._reads = iter(plan.reads)
        self._take = threading.Lock()
        self._stopped = False
        self._process = os.getpid()
        self._results: queue.SimpleQueue[_Done | BaseException] = queue.SimpleQueue()
        self._filled: queue.SimpleQueue[_Filled | None] = queue.SimpleQueue()
        self._readers: list[Worker] = []
        self._copiers: list[Worker] = []

    @contextmanager
    def working(self) -> Iterator[None]:
        """Start the threads, and join them whatever happens."""
        try:
            self._targets.begin(self._staging)
            start_threads(self._copiers, self._plan.copiers, self._copy, "sluice-copier")
            start_threads(self._readers, self._plan.readers if self._plan.reads else 0, self._read, "sluice-reader")
            if not self._readers:
                self._read()
            yield
        finally:
            self._stopped = True
            try:
                join_threads(self._readers)
            finally:
                for _ in range(self._plan.copiers):  # also for one that an interrupt kept out of the list
                    self._filled.put(None)
                try:
                    join_threads(self._copiers)
                finally:
                    self._targets.finish()

    def results(self, count: int) -> Iterator[_Done]:
        """Yield ``count`` finished reads as they come; raise the first failure instead."""
        for _ in range(count):
            if os.getpid() != self._process:  # a callback forked, and this is the child: it has no other threads
                raise ReadError("the process was forked during the load; only the parent can finish it")
            result = self._results.get()
            if isinstance(result, BaseException):
                raise result
            yield result

    def _read(self) -> None:
        """Read until nothing is left; the work of a reader."""
        try:
            while not self._stopped:
                with self._take:
                    read = next(self._reads, None)
                if read is None:
                    return
                if read.into is not None:
                    self._results.put(_Done(read, self._read_in_place(read, read.into)))
                else:
                    self._read_staged(read)
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            self._results.put(error)

    def _read_staged(self, read: Read) -> None:
        first = read.offset % options.BLOCK_BYTES
        buffer = self._staging.borrow()
        try:
            method = self._fetch(read, lambda start, nbytes: buffer.view[start + first : start + first + nbytes])
        except BaseException:
            self._staging.give_back(buffer)
            raise
        filled = _Filled(_Done(read, method), buffer)
        if self._copiers:
            self._filled.put(filled)
        else:
            self._empty(filled)

    def _copy(self) -> None:
        """Empty the buffers that readers have filled; the work of a copier. It ends when the readers have."""
        while (filled := self._filled.get()) is not None:
            self._empty(filled)

    def _empty(self, filled: _Filled) -> None:
        """Copy a buffer's content to its targets and give it back, in any case: a reader may be waiting for it."""
        read = filled.done.read
        try:
            if self._stopped:
                return
            # Grad and inference mode belong to each thread: parameters made of inference tensors could not be trained.
            with torch.inference_mode(mode=False), torch.no_grad():
                self._targets.copy_out(read, filled.buffer, read.offset % options.BLOCK_BYTES)
            self._results.put(filled.done)
        except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
            self._results.put(error)
        finally:
            self._staging.give_back(filled.buffer)

    def _read_in_place(self, read: Read, position: int) -> Method:
        return self._fetch(read, lambda start, nbytes: self._targets.window(position, read.into_offset + start, nbytes))

    def _fetch(self, read: Read, window: Callable[[int, int], memoryview]) -> Method:
        """Read a range by the first permitted method that the file system accepts.

        Args:
            read: The range.
            window: Returns memory for ``nbytes`` bytes from ``start``, counted from the range's first byte.
        """
        source = self._sources[read.file]
        for method in read.methods:
            first, last = read.offset, read.offset + read.nbytes
            if method == "direct":
                first, last = round_down(first, options.BLOCK_BYTES), round_up(last, options.BLOCK_BYTES)
            try:
                found = source.read_into(first, window(first - read.offset, last - first), direct=method == "direct")
            except DirectIOUnavailable:
                continue
            if first + found < read.offset + read.nbytes:
                raise self._short(source, read, first + found)
            if method == "buffered" and self._plan.drop_behind:
                source.forget(read.offset, read.nbytes)
            return method
        raise ReadError("no permitted way to read this range", file=source.path, offset=read.offset)

    @staticmethod
    def _short(source: Source, read: Read, end: int) -> Exception:
        source.check_unchanged()
        return TruncatedError(
            "the file ends too early",
            file=source.path,
            offset=read.offset,
            expected=f"{read.nbytes} bytes",
            found=f"{max(0, end - read.offset)} bytes",
        )
