"""Rounds of a plan: one rank reads a range, and hands it to the others.

In front of each round every rank gives a status word. If one has failed, on reading or on copying what it received, all
of them end at the same round, so that no transfer is left half done and the process group stays usable. Nothing that
can fail on one rank alone is between a status word and its transfer.

Rounds are run in the thread of the caller: the ranks have to begin their transfers in the same order.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import ParamSpec, Protocol, TypeVar

from msgspec import Struct

from sluice import _defaults as defaults
from sluice._errors import ReadError
from sluice._geometry import round_down, round_up
from sluice.engine.running_plan import TargetMemory
from sluice.engine.staging import StagingBuffer, StagingPool
from sluice.records import LoadPlan, Read, Round
from sluice.sources.protocol import DirectIOUnavailable, Source
from sluice.sources.short_reads import too_early

__all__ = ["RoundsResult", "Transport", "run_rounds"]

P = ParamSpec("P")
R = TypeVar("R")


class Transport(Protocol):
    """Transfers between the ranks of a load."""

    @property
    def rank(self) -> int:
        """Rank of this process."""
        ...

    def begin(self, error: BaseException | None) -> None:
        """Return when every rank has done its own reads; raise if one has failed.

        Args:
            error: The failure of this rank, which is raised again; None if it succeeded.
        """
        ...

    def all_well(self, *, well: bool) -> bool:
        """Return whether every rank is well; every rank calls it."""
        ...

    def broadcast(self, memory: memoryview, owner: int, group: int) -> None:
        """Send memory of the owner to the same number of bytes of every other rank of a group; they all call it."""
        ...

    def other_failed(self) -> Exception:
        """Return what this rank raises if a different one failed."""
        ...


class _Failure:
    """The first failure of this rank, and interrupts, which wait until the ranks have agreed to end."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def attempt(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R | None:
        """Call a function unless something failed before."""
        if self.error is None:
            try:
                return function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001  raised when all ranks have ended their rounds
                self.error = error
        return None

    def interrupt(self, _number: int, _frame: FrameType | None) -> None:
        """Handle SIGINT."""
        self.error = self.error or KeyboardInterrupt()


class RoundsResult(Struct, frozen=True, kw_only=True):
    """Bytes that the rounds of a plan moved, on this rank."""

    #: Bytes that this rank read, by method.
    read_bytes: dict[str, int]
    #: Bytes that it received and needed.
    received_bytes: int


def run_rounds(
    sources: Sequence[Source],
    plan: LoadPlan,
    targets: TargetMemory,
    transport: Transport,
    pool: StagingPool,
    *,
    progress: Callable[[int], None] | None = None,
    completed: Callable[[Read], None] | None = None,
) -> RoundsResult:
    """Go through the rounds of a plan, together with the other ranks, whose own reads are done too.

    Args:
        sources: The files of the plan.
        plan: The plan.
        targets: Where the bytes go.
        transport: Transfers.
        pool: One staging buffer; the caller allocates it before the ranks wait for each other, because that may fail.
        progress: Called with the bytes of this rank's rounds so far.
        completed: Called with each read of a round whose bytes have arrived.

    Raises:
        ReadError: The operating system failed a read of this rank.
        TruncatedError: A file is shorter than it was when it was indexed.
        SourceChangedError: A file is no longer the one that was indexed.
        Exception: That of ``transport.other_failed`` if a different rank failed.
    """
    failure = _Failure()
    read_bytes = {"direct": 0, "buffered": 0}
    received = total = 0
    ended = False
    buffer = pool.borrow()

    def finish(each: Round, arrived: _Arrival) -> None:
        arrived.take(targets)
        for read in each.reads if completed else ():
            completed(read)  # type: ignore[misc]
        if progress:
            progress(total)

    with _interrupts_deferred(failure):
        failure.attempt(targets.begin, pool)
        for each in plan.rounds:
            own = each.owner == transport.rank
            arrival = _Arrival(each, buffer)
            failure.attempt(arrival.prepare, targets)
            method = failure.attempt(arrival.fetch, sources[each.file], plan) if own else None
            try:
                ended = not transport.all_well(well=failure.error is None)
                if ended:
                    break
                if each.takes_part:
                    transport.broadcast(arrival.memory, each.owner, each.group)
            except Exception as error:  # noqa: BLE001  a rank was lost: the group cannot be used any more
                failure.error = failure.error or error
                break
            if method is not None:
                read_bytes[method] += each.nbytes
            elif each.reads:
                received += each.nbytes
            total += each.nbytes if each.reads else 0
            failure.attempt(finish, each, arrival)
        failure.attempt(_check, sources, plan, transport.rank)
        targets.finish()
        pool.close()
    if failure.error is None and ended:
        failure.error = transport.other_failed()
    if failure.error is not None:
        raise failure.error
    return RoundsResult(read_bytes=read_bytes, received_bytes=received)


class _Arrival:
    """Where the bytes of a round arrive: in their final memory if exactly they are needed, otherwise in staging."""

    memory: memoryview

    def __init__(self, each: Round, buffer: StagingBuffer) -> None:
        self._round, self._buffer = each, buffer
        self._base = each.offset % defaults.BLOCK_BYTES
        self._window: Callable[[int, int], memoryview] = self._staged
        self.memory = self._staged(0, each.nbytes)

    def prepare(self, targets: TargetMemory) -> None:
        """Allocate the final memory."""
        if len(self._round.reads) == 1:
            (read,) = self._round.reads
            into = read.into
            if into is not None and (read.offset, read.nbytes) == (self._round.offset, self._round.nbytes):
                self._window = lambda start, nbytes: targets.window(into, read.into_offset + start, nbytes)
                self.memory = self._window(0, self._round.nbytes)

    def fetch(self, source: Source, plan: LoadPlan) -> str:
        """Read the range by the first permitted method that the file system accepts; return the method."""
        first, last = self._round.offset, self._round.offset + self._round.nbytes
        for method in self._round.reads[0].methods:
            start, stop = first, last
            if method == "direct":
                start, stop = round_down(first, defaults.BLOCK_BYTES), round_up(last, defaults.BLOCK_BYTES)
            try:
                found = source.read_into(start, self._window(start - first, stop - start), direct=method == "direct")
            except DirectIOUnavailable:
                continue
            if start + found < last:
                source.check_unchanged()
                raise too_early(source.path, first, last - first, start + found - first)
            if method == "buffered" and plan.drop_behind:
                source.forget(first, last - first)
            return method
        raise ReadError("no permitted method can read this range", file=source.path, offset=first)

    def take(self, targets: TargetMemory) -> None:
        """Copy what this rank needs out of staging."""
        if self._window != self._staged:
            return
        for read in self._round.reads:
            start = read.offset - self._round.offset
            if read.into is None:
                targets.copy_out(read, self._buffer, self._base + start)
            else:
                targets.window(read.into, read.into_offset, read.nbytes)[:] = self._staged(start, read.nbytes)
        while self._buffer.tickets:
            self._buffer.tickets.pop().wait()

    def _staged(self, start: int, nbytes: int) -> memoryview:
        return self._buffer.view[self._base + start : self._base + start + nbytes]


def _check(sources: Sequence[Source], plan: LoadPlan, rank: int) -> None:
    """Raise if a file from which this rank read rounds has changed."""
    for file in sorted({each.file for each in plan.rounds if each.owner == rank}):
        sources[file].check_unchanged()


@contextmanager
def _interrupts_deferred(failure: _Failure) -> Iterator[None]:
    """Make an interrupt a failure of this rank, which ends the rounds of all: it must not end one transfer alone."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(signal.SIGINT, failure.interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)
