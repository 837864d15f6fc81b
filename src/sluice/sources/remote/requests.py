"""A range of a remote object that is received in order, by one request unless bodies end early."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from sluice.sources.remote.protocol import Body, ObjectFacts, RemoteObject, RequestFailedError
from sluice.sources.remote.retries import Attempts, Speed
from sluice.sources.remote.servers import Server

__all__ = ["OpenRequest"]

#: Bytes of the memory for parts of a range that are dropped.
_SKIPPED_BYTES = 64 << 10


class OpenRequest:
    """A range that is being received. It belongs to one thread, which closes it.

    The request is made when the first byte is needed that is not known from the opening of the object.

    Attributes:
        position: The next byte, as an offset in the object.
        end: First byte after the range.
    """

    def __init__(
        self,
        remote: RemoteObject,
        facts: ObjectFacts,
        *,
        offset: int,
        end: int,
        known: bytes,
        attempts: Attempts,
        clock: Callable[[], float],
        server: Server,
        count: Callable[[int, float, int | None], None],
    ) -> None:
        """Request nothing yet.

        Args:
            remote: The object.
            facts: Its opened version.
            offset: First byte of the range.
            end: First byte after it.
            known: The first bytes of the object.
            attempts: What decides about failures.
            clock: Seconds.
            server: The server of the object, which permits requests.
            count: Called after each request with the bytes that it brought, its seconds, and its status if known.
        """
        self._remote, self._facts, self._known = remote, facts, known
        self._attempts, self._clock, self._server, self._count = attempts, clock, server, count
        self.position, self.end = offset, end
        self._opened: ExitStack | None = None
        self._body: Body | None = None
        self._speed = Speed(clock)
        self._received = self._round = 0
        self._began = 0.0

    def receive(self, buffer: memoryview) -> None:
        """Fill a buffer with the next bytes, which are inside of the range.

        Raises:
            RemoteError: The server does not answer, or fails too often.
            SourceChangedError: The object is no longer the one of the opened version.
        """
        known = self._known[self.position : self.position + len(buffer)]
        buffer[: len(known)] = known
        self.position += len(known)
        done = len(known)
        self._speed.resume()
        while done < len(buffer):
            try:
                found = self._some(buffer[done:])
            except RequestFailedError as error:
                received = self._received
                self._end_request(error)
                self._attempts.failed(error, received)
                continue
            done += found
            self.position += found

    def skip(self, nbytes: int) -> None:
        """Receive bytes that are not needed."""
        if nbytes:
            scratch = memoryview(bytearray(min(nbytes, _SKIPPED_BYTES)))
            for start in range(0, nbytes, _SKIPPED_BYTES):
                self.receive(scratch[: nbytes - start])

    def close(self) -> None:
        """End the request; its connection is used again if everything was received."""
        self._end_request(None)

    def _some(self, buffer: memoryview) -> int:
        """Receive some bytes, at least one."""
        if self._body is None:
            self._round = self._server.begin()
            self._opened, self._received, self._speed = ExitStack(), 0, Speed(self._clock)
            self._began = self._clock()
            self._body = self._opened.enter_context(
                self._remote.open_range(self.position, self.end - self.position, self._facts)
            )
        found = self._body.readinto(buffer)
        if not found:
            raise RequestFailedError("the answer ended too early", temporary=True)
        self._received += found
        self._speed.received(found)
        return found

    def _end_request(self, error: RequestFailedError | None) -> None:
        opened, received = self._opened, self._received
        status = error.status if error else getattr(self._body, "status", None)
        if opened is None:
            return
        self._opened = self._body = None
        self._received = 0
        try:
            opened.__exit__(type(error) if error else None, error, None)
        finally:
            self._server.end(self._round, error)
            self._count(received, self._clock() - self._began, status)
