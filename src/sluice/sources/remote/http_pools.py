"""Connections of urllib3 that return answers as they arrive, and that can refuse private addresses."""

from __future__ import annotations

import threading
import time
from http.client import HTTPResponse
from io import BufferedReader

from urllib3 import BaseHTTPResponse
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool

from sluice import _defaults as defaults
from sluice.sources.remote.http_addresses import is_private
from sluice.sources.remote.protocol import RequestFailedError

__all__ = ["POOLS", "PUBLIC_POOLS", "SlowHeadersError", "private_address_failure", "receive"]

#: Seconds after which a read returns what it has.
_READ_SECONDS = 1.0


class _Target(threading.local):
    """Memory that the next read in this thread fills; None if there is none, or if a read has taken it."""

    view: memoryview | None = None


_TARGET = _Target()


def receive(response: BaseHTTPResponse, buffer: memoryview) -> int:
    """Receive some bytes of an answer into a buffer; return their number, 0 at the end.

    ``readinto`` of urllib3 makes an object of the bytes and copies them. Here the last layer writes to the buffer.
    """
    _TARGET.view = buffer
    try:
        data = response.read(len(buffer))
    finally:
        taken, _TARGET.view = _TARGET.view is None, None
    if not taken:
        buffer[: len(data)] = data
    return len(data)


class SlowHeadersError(TimeoutError):
    """The headers of an answer take too long, although some of their bytes arrive."""


class _HeaderLines:
    """The lines of the headers of one answer, with a limit on the time of all of them."""

    def __init__(self, stream: BufferedReader) -> None:
        self.stream = stream
        self._until: float | None = None

    def readline(self, limit: int = -1) -> bytes:
        line = bytearray()
        while not line.endswith(b"\n") and len(line) != limit:
            arrived = self.stream.peek()
            now = time.monotonic()
            if self._until is None:
                self._until = now + defaults.REMOTE_HEADERS_SECONDS
            if now > self._until:
                raise SlowHeadersError
            if not arrived:
                break
            end = arrived.find(b"\n") + 1 or len(arrived)
            line += self.stream.read1(min(end, limit - len(line)) if limit >= 0 else end)
        return bytes(line)

    def close(self) -> None:
        self.stream.close()


class _PromptResponse(HTTPResponse):
    """An answer whose headers have a time limit, and whose reads return after a second, if they have any bytes.

    The reads of the standard library return when they have all bytes, so that one of 256 KiB may take years from a
    server that sends a byte at a time. Its ``read1`` returns after each record of TLS, and passing through the layers
    of urllib3 with each takes as much processor time as decrypting it.
    """

    def begin(self) -> None:
        """Receive the headers."""
        stream = self.fp
        self.fp = _HeaderLines(stream)  # type: ignore[assignment]  # it has what is used of a stream here
        try:
            super().begin()
        finally:
            if self.fp is not None:
                self.fp = stream

    def read(self, amt: int | None = None) -> bytes:
        target = _TARGET.view
        if not amt or target is None or self.length is None or self.isclosed():
            return super().read(amt)
        _TARGET.view = None
        data = target[: min(amt, self.length)]
        found, until = 0, time.monotonic() + _READ_SECONDS
        while found < len(data) and (not found or time.monotonic() < until):
            try:
                some = self.fp.readinto1(data[found:])
            except OSError:
                if not found:
                    raise
                break  # the next read fails again, or finds the end
            if not some:
                break
            found += some
        self.length -= found
        if not self.length or not found:
            self.close()
        return data[:found]  # type: ignore[return-value]  # only ``receive`` gets it, and its length is what counts


def private_address_failure() -> RequestFailedError:
    """Return the failure of a redirect to a private address."""
    return RequestFailedError(
        "the server redirects to a private address",
        temporary=False,
        advice="A public server must not make this machine ask a private one. If that is intended, use its address.",
    )


def _refuse_private(connection: HTTPConnection) -> None:
    """Refuse a connection before a request is sent, by the address that it has: names can change in between."""
    connected = connection.sock
    if connection.proxy is None and connected is not None and is_private(str(connected.getpeername()[0])):
        connection.close()
        raise private_address_failure()


class _Connection(HTTPConnection):
    response_class = _PromptResponse


class _TlsConnection(HTTPSConnection):
    response_class = _PromptResponse


class _PublicConnection(_Connection):
    def connect(self) -> None:
        super().connect()
        _refuse_private(self)


class _PublicTlsConnection(_TlsConnection):
    def connect(self) -> None:
        super().connect()
        _refuse_private(self)


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


class _PublicPool(HTTPConnectionPool):
    ConnectionCls = _PublicConnection


class _PublicTlsPool(HTTPSConnectionPool):
    ConnectionCls = _PublicTlsConnection


#: Pools by scheme, and those whose connections refuse private addresses.
POOLS: dict[str, type[HTTPConnectionPool]] = {"http": _Pool, "https": _TlsPool}
PUBLIC_POOLS: dict[str, type[HTTPConnectionPool]] = {"http": _PublicPool, "https": _PublicTlsPool}
