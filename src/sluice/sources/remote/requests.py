"""A range of a remote file that is received in order, by one request unless bodies end early; and what it must have."""

from __future__ import annotations

import threading
from bisect import bisect_right, insort
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from sluice.sources.remote.protocol import Body, RequestFailedError
from sluice.sources.remote.retries import Attempts, Speed
from sluice.sources.wrappers import ForwardingSource

if TYPE_CHECKING:
    from sluice.sources.remote.file import RemoteFile

__all__ = ["Expectations", "OpenRequest"]

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


#: Bytes of the memory for parts of a range that are dropped.
_SKIPPED_BYTES = 64 << 10


class OpenRequest(ForwardingSource):
    """A remote file whose reads share one request as long as they are in order, within its range; see ``Source``.

    It belongs to one thread. The request is made when the first byte is needed that is not known from the opening.
    """

    _source: RemoteFile

    def __init__(self, file: RemoteFile, *, offset: int, end: int, known: bytes, attempts: Attempts) -> None:
        """Request nothing yet.

        Args:
            file: The file.
            offset: First byte of the range.
            end: First byte after it.
            known: The first bytes of the object.
            attempts: What decides about failures.
        """
        super().__init__(file)
        self._known, self._attempts = known, attempts
        self._position, self._end = offset, end
        self._response: ExitStack | None = None
        self._body: Body | None = None
        self._speed = Speed(file.clock)
        self._received = self._round = 0
        self._began = 0.0

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        if direct or offset < self._position or offset + len(buffer) > self._end:
            return self._source.read_into(offset, buffer, direct=direct)
        lead = self._source.expected.lead(offset)
        before = memoryview(bytearray(lead if offset - lead >= self._position else 0))
        first = offset - len(before)
        self._skip(first - self._position)
        self.receive(before)
        self.receive(buffer)

        def part(start: int, end: int) -> bytes:
            inside = buffer[max(0, start - offset) : max(0, end - offset)]
            return bytes(before[max(0, start - first) : max(0, end - first)]) + bytes(inside)

        self._source.expected.look(first, offset + len(buffer), part)
        return len(buffer)

    def receive(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes, which are inside of the range.

        Raises:
            RemoteError: The server does not answer, or fails too often.
            SourceChangedError: The object is no longer the one of the opened version.
        """
        known = self._known[self._position : self._position + len(buffer)]
        buffer[: len(known)] = known
        self._position += len(known)
        done = len(known)
        self._speed.resume()
        while done < len(buffer):
            try:
                found = self._some(buffer[done:])
            except RequestFailedError as error:
                received = self._received
                self.end(error)
                self._attempts.failed(error, received)
                continue
            done += found
            self._position += found

    def end(self, error: RequestFailedError | None = None) -> None:
        """End the request; its connection is used again if everything was received."""
        response, received = self._response, self._received
        status = error.status if error else getattr(self._body, "status", None)
        if response is None:
            return
        self._response = self._body = None
        self._received = 0
        try:
            response.__exit__(type(error) if error else None, error, None)
        finally:
            self._source.server.end(self._round, error)
            self._source.count(received, self._source.clock() - self._began, status)

    def _skip(self, nbytes: int) -> None:
        if nbytes:
            scratch = memoryview(bytearray(min(nbytes, _SKIPPED_BYTES)))
            for start in range(0, nbytes, _SKIPPED_BYTES):
                self.receive(scratch[: nbytes - start])

    def _some(self, buffer: memoryview) -> int:
        """Receive some bytes, at least one."""
        if self._body is None:
            self._round = self._source.server.begin()
            self._response, self._received, self._speed = ExitStack(), 0, Speed(self._source.clock)
            self._began = self._source.clock()
            request = self._source.remote.open_range(self._position, self._end - self._position, self._source.facts)
            self._body = self._response.enter_context(request)
        found = self._body.readinto(buffer)
        if not found:
            raise RequestFailedError("the response ended too early", temporary=True)
        self._received += found
        self._speed.received(found)
        return found
