"""Remote objects as sources: retries, resumed bodies, and the first bytes kept from the opening request."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._errors import SourceChangedError, TruncatedError
from sluice.records import AccessFacts, FileIdentity, RequestRecord, Traffic
from sluice.records.geometry import round_up
from sluice.sources.protocol import Source
from sluice.sources.ranges import read_ranges
from sluice.sources.remote.protocol import ObjectFacts, RemoteObject, RequestFailedError
from sluice.sources.remote.requests import Expectations, OpenRequest
from sluice.sources.remote.retries import Attempts, Speed, server_of, wait
from sluice.sources.wrappers import RangedSource

__all__ = ["RemoteFile", "remote_access"]

#: Files that keep their first bytes, the latest last. They are read soon after the opening, or not at all; a checkpoint
#: of a thousand shards would keep 64 MiB of them.
_KEPT: deque[weakref.ref[RemoteFile]] = deque()

#: Bytes at both ends of a file without a version that are compared after a load: in a zip file they have checksums.
_SAMPLE_BYTES = 64 << 10

_NO_VERSION = "the server names no version (ETag or Last-Modified): only both ends were compared after the load"

#: Most records of requests that are kept until there is an observer: those of the opening.
_KEPT_RECORDS = 4


class RemoteFile(RangedSource):
    """An object of a server; see ``Source``.

    A body that ends early is resumed at the byte that was reached. Reads are independent of each other, so any number
    of threads may read.
    """

    #: Whether each request names the version that was opened, so that bytes of a different one are never received.
    pinned = True

    def __init__(
        self,
        remote: RemoteObject,
        *,
        access: AccessFacts | None = None,
        sleep: Callable[[float], None] = wait,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Make the opening request, which also brings the first bytes.

        Args:
            remote: The object, which is closed if this fails.
            access: The requests that suit the server; None for the defaults of remote sources.
            sleep: Waits for some seconds.
            clock: Seconds.

        Raises:
            MissingFileError: There is no such object.
            TruncatedError: It is empty.
            UnsupportedError: The server does not answer ranges.
            RemoteError: The server does not answer.
        """
        self.remote, self.path, self._sleep, self.clock = remote, remote.path, sleep, clock
        self.traffic, self._counting = Traffic(), threading.Lock()
        self.server = server_of(remote.path)
        self._requests: list[RequestRecord] = []
        self._observer: Callable[[RequestRecord], object] | None = None
        self.expected = Expectations()
        self.access = access or remote_access()
        try:
            began = clock()
            #: Size and version that the opening request told.
            self.facts, self._head = self._open()
            if self.access.joins_reads:
                self.access = _for_latency(self.access, clock() - began)
            _KEPT.append(weakref.ref(self))
            while len(_KEPT) > defaults.REMOTE_FIRST_BYTES_KEPT:
                if (oldest := _KEPT.popleft()()) is not None:
                    oldest._head = b""  # noqa: SLF001  (of this class)
            if not self.facts.nbytes:
                raise TruncatedError("the file is empty", file=remote.path)
        except BaseException:
            remote.close()
            raise
        facts = self.facts
        version = facts.version or facts.weak_version or facts.modified
        self.identity = FileIdentity(nbytes=facts.nbytes, version=version, weak=version != facts.version)
        #: Remark on the file for the report of a load, as a clause.
        self.note = None if facts.pinnable else _NO_VERSION
        self._samples: dict[int, bytes] = {} if facts.pinnable else {0: self._head}
        if not facts.pinnable and facts.nbytes > _SAMPLE_BYTES:
            self._samples |= self._sample(facts.nbytes - _SAMPLE_BYTES)

    def fill_buffer(self, offset: int, buffer: memoryview) -> None:
        with self.request(offset, len(buffer)) as opened:
            opened.read_into(offset, buffer)

    @contextmanager
    def request(self, offset: int, nbytes: int) -> Iterator[Source]:
        begin, end = offset - self.expected.lead(offset), min(offset + nbytes, self.identity.nbytes)
        attempts = self._attempts(begin)
        request = OpenRequest(self, offset=begin, end=end, known=self._head, attempts=attempts)
        try:
            yield request
        finally:
            request.end()

    def expect(self, offset: int, nbytes: int, data_bytes: int, check: Callable[[bytes], None]) -> None:
        self.expected.add(offset, nbytes, data_bytes, check)

    def _sample(self, offset: int) -> dict[int, bytes]:
        """Request bytes of the file again, also those that are kept."""
        head, self._head = self._head, b""
        try:
            return {offset: self.read_at(offset, min(_SAMPLE_BYTES, self.facts.nbytes - offset))}
        finally:
            self._head = head

    def check_unchanged(self) -> None:
        for offset, was in self._samples.items():
            if self._sample(offset)[offset][: len(was)] != was:
                problem = "the file was replaced by one of the same size while it was being read"
                raise SourceChangedError(problem, file=self.path, offset=offset)
        # Every answer was held against the object that was opened. What is left are ranges in front of data.
        left = self.expected.left()
        read_ranges(self, [offset for offset, _ in left], [nbytes for _, nbytes in left])

    def close(self) -> None:
        self._head = b""  # also of an object that has changed when it is read again
        self.remote.close()

    def _open(self) -> tuple[ObjectFacts, bytes]:
        """Return what the server says about the object, and its first bytes."""

        def first_bytes() -> tuple[ObjectFacts, bytes]:
            done, status, began = 0, None, self.clock()
            try:
                facts, opened = self.remote.open_first(defaults.REMOTE_FIRST_BYTES)
                head = bytearray(min(defaults.REMOTE_FIRST_BYTES, facts.nbytes))
                with opened as body, memoryview(head) as view:
                    status = getattr(body, "status", None)
                    speed = Speed(self.clock)
                    # Fewer bytes are not a failure: missing ones are requested when they are read.
                    while done < len(head) and (found := body.readinto(view[done:])):
                        done += found
                        speed.received(found)
                return facts, bytes(head[:done])
            except RequestFailedError as error:
                status = error.status
                raise
            finally:
                self.count(done, self.clock() - began, status)

        return self._attempts(0).repeat(first_bytes)

    def _attempts(self, offset: int) -> Attempts:
        return Attempts(self.path, offset, sleep=self._sleep, clock=self.clock, server=self.server)

    def observe(self, observer: Callable[[RequestRecord], object]) -> None:
        """Call a function after each request, also for those of the opening."""
        requests, self._requests, self._observer = self._requests, [], observer
        for each in requests:
            observer(each)

    def count(self, nbytes: int, seconds: float, status: int | None) -> None:
        """Count a request with the bytes that it brought, its seconds, and its status if known."""
        with self._counting:
            self.traffic = Traffic(self.traffic.requests + 1, self.traffic.nbytes + nbytes)
        record = RequestRecord("GET", self.path, nbytes, seconds, status)
        if self._observer is not None:
            self._observer(record)
        elif len(self._requests) < _KEPT_RECORDS:
            self._requests.append(record)


def remote_access(parallel_requests: int | None = None) -> AccessFacts:
    """Return the requests that suit most servers; None: as many at once as HTTP gets."""
    return AccessFacts(
        request_bytes=defaults.REMOTE_READ_BYTES,
        gap_bytes=defaults.REMOTE_GAP_BYTES,
        parallel_requests=parallel_requests or defaults.REMOTE_REQUESTS,
        first_bytes=defaults.REMOTE_FIRST_BYTES,
        header_bytes=defaults.REMOTE_HEADER_BYTES,
        joins_reads=True,
    )


def _for_latency(access: AccessFacts, seconds: float) -> AccessFacts:
    """Return access facts with requests that keep a fast line busy in spite of the latency.

    While one of n connections waits for its answer, the others transfer n - 1 requests. They last for the latency if
    each has 1 / (n - 1) of the bytes that the line transfers in that time. Requests do not become smaller.
    """
    step = access.request_bytes
    bytes_per_request = int(seconds * defaults.REMOTE_LINE_BYTES) // max(1, access.parallel_requests - 1)
    return replace(access, request_bytes=min(max(step, round_up(bytes_per_request, step)), defaults.REMOTE_MOST_BYTES))
