"""Connections of urllib3 that return answers as they arrive, and that can refuse private addresses; their bodies."""

from __future__ import annotations

import logging
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from io import BufferedReader, RawIOBase
from typing import Any, Self

from urllib3 import BaseHTTPResponse
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.connectionpool import HTTPConnectionPool, HTTPSConnectionPool
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)

from sluice import _defaults as defaults
from sluice._threads import stopping
from sluice.sources.remote.http_addresses import Network, may_lead, network_of
from sluice.sources.remote.protocol import RequestFailedError

__all__ = ["POOLS", "HttpBody", "discard", "private_address_failure", "request_failure", "requesting"]

#: Most bytes received at a time, and from a body of unknown size. With 1 MiB the layers of urllib3 take a fifth of the
#: processor time; a slow server is noticed at any size, because reads return after a second.
_SLICE_BYTES, _RECEIVE_BYTES = 8 << 20, 16 << 10

#: Reasons of OpenSSL for an answer in plain text.
_PLAIN_TEXT = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL"})

#: Seconds after which a read returns what it has, and after which one that waits looks whether it is still needed.
_READ_SECONDS, _STEP_SECONDS = 1.0, 0.2


class _Target(threading.local):
    """State of the next request or read of this thread."""

    #: Memory that the next read fills; None if there is none, or if a read has taken it.
    view: memoryview | None = None
    #: Whether a request is being made, and the network from which a redirect to it came; None without one.
    requesting: bool = False
    first: Network | None = None


_TARGET = _Target()


def _without_queries(record: logging.LogRecord) -> bool:
    """Remove queries, which may be signatures, from what urllib3 logs about requests of sluice."""
    if _TARGET.requesting and isinstance(record.args, tuple):
        record.args = tuple(
            each.partition("?")[0] + "?..." if isinstance(each, str) and "?" in each else each for each in record.args
        )
    return True


for _logger in ("urllib3.connection", "urllib3.connectionpool"):
    logging.getLogger(_logger).addFilter(_without_queries)


def _receive(response: BaseHTTPResponse, buffer: memoryview) -> int:
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


class _SlowHeadersError(TimeoutError):
    """The headers of an answer take too long, although some of their bytes arrive."""


class _Received(RawIOBase):
    """The bytes of a connection. A wait for them ends soon after the call for which this thread works has ended."""

    #: Time until which headers have to arrive: None before their first byte, infinite after their last.
    headers_until: float | None = None

    def __init__(self, connection: socket.socket, stream: BufferedReader) -> None:
        """Keep the stream of a connection open, and shorten its timeout until the next request."""
        self._connection, self._stream = connection, stream
        self._seconds = connection.gettimeout() or defaults.REMOTE_TIMEOUT_SECONDS
        connection.settimeout(min(_STEP_SECONDS, self._seconds))

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        began = time.monotonic()
        while True:
            try:
                found = self._connection.recv_into(buffer)
            except TimeoutError:
                if stopping() or time.monotonic() >= began + self._seconds:
                    self._seconds = 0  # the next read fails too
                    raise
                continue
            now = time.monotonic()
            if self.headers_until is None:
                self.headers_until = now + defaults.REMOTE_HEADERS_SECONDS
            if now > self.headers_until:
                raise _SlowHeadersError
            return found

    def close(self) -> None:
        super().close()
        self._stream.close()


class _PromptResponse(HTTPResponse):
    """An answer whose headers have a time limit, and whose reads return after a second, if they have any bytes.

    The reads of the standard library return when they have all bytes, so that one of 256 KiB may take years from a
    server that sends a byte at a time. Its ``read1`` returns after each record of TLS, and passing through the layers
    of urllib3 with each takes as much processor time as decrypting it.
    """

    def __init__(self, sock: socket.socket, *arguments: Any, **more: Any) -> None:
        super().__init__(sock, *arguments, **more)
        self._connection = sock

    def begin(self) -> None:
        """Receive the headers."""
        received = _Received(self._connection, self.fp)
        self.fp = BufferedReader(received)
        super().begin()
        received.headers_until = math.inf

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
    """Return the failure of a redirect to an address that its first address must not lead to."""
    return RequestFailedError(
        "the server redirects to a private address",
        temporary=False,
        advice="A public server must not make this machine ask a private one. If that is intended, use its address.",
    )


@contextmanager
def requesting(first: Network | None) -> Iterator[None]:
    """Have this thread make a request in the block, to which ``first`` redirects; None: no redirect.

    New connections that a redirect must not make are refused. The address that a connection has is compared, before a
    request is sent: names can change in between.
    """
    _TARGET.requesting, _TARGET.first = True, first
    try:
        yield
    finally:
        _TARGET.requesting, _TARGET.first = False, None


def _check(connection: HTTPConnection) -> None:
    connected, first = connection.sock, _TARGET.first
    if connection.proxy is not None or connected is None or first is None:
        return
    if not may_lead(first, network_of(str(connected.getpeername()[0]))):
        connection.close()
        raise private_address_failure()


class _Connection(HTTPConnection):
    response_class = _PromptResponse

    def connect(self) -> None:
        super().connect()
        _check(self)


class _TlsConnection(HTTPSConnection):
    response_class = _PromptResponse

    def connect(self) -> None:
        super().connect()
        _check(self)


class _Pool(HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


#: Pools by scheme.
POOLS: dict[str, type[HTTPConnectionPool]] = {"http": _Pool, "https": _TlsPool}


class HttpBody:
    """The body of one answer; see ``Body``."""

    def __init__(self, response: BaseHTTPResponse, nbytes: int, *, failed: Callable[[], None] = lambda: None) -> None:
        """Take an answer.

        Args:
            response: The answer.
            nbytes: Size of its body. More bytes are an error.
            failed: Called when the connection fails.
        """
        self._response, self._left, self._failed = response, nbytes, failed
        self.status = response.status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        discard(self._response)

    def readinto(self, buffer: memoryview) -> int:
        if not self._left:
            return 0
        found = self._received(buffer[: self._left])
        self._left -= found
        # The end of a body without a size is read too: more bytes would be those of a different answer.
        if found and not self._left and self._received(memoryview(bytearray(1))):
            raise RequestFailedError("the answer has more bytes than it should", temporary=False)
        return found

    def _received(self, buffer: memoryview) -> int:
        try:
            if self._response.length_remaining is not None:
                return _receive(self._response, buffer[:_SLICE_BYTES])
            data: bytes = self._response.read1(min(len(buffer), _RECEIVE_BYTES)) or b""
        except (HTTPError, OSError, ValueError) as error:
            self._failed()
            raise request_failure(error) from error
        buffer[: len(data)] = data
        return len(data)


def discard(response: BaseHTTPResponse) -> None:
    """End an answer. Its connection is used again only if nothing of it is unread."""
    response.close()
    response.release_conn()


def request_failure(error: Exception) -> RequestFailedError:
    """Return the failure of the request. The text of urllib3 is not repeated: it may name addresses with signatures."""
    cause = error.__cause__ or error.__context__
    if isinstance(error, ProxyError):
        return RequestFailedError(
            "the proxy does not answer", temporary=True, advice="Check the proxy.", unreached=True
        )
    if isinstance(error, NameResolutionError):
        again = isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_AGAIN
        problem = "the name of the host is unknown"
        return RequestFailedError(problem, temporary=again, advice="Check the address.", unreached=True)
    if isinstance(error, SSLError):
        return _tls_failure(error)
    if isinstance(cause, _SlowHeadersError):
        return RequestFailedError("the headers of the answer take too long", temporary=True)
    if isinstance(error, ReadTimeoutError):
        return RequestFailedError("the server sent nothing for too long", temporary=True)
    if isinstance(error, ConnectTimeoutError) and not isinstance(error, NewConnectionError):
        return RequestFailedError("the server does not accept the connection", temporary=True, unreached=True)
    if isinstance(error, HTTPError) and not isinstance(error, NewConnectionError):
        return RequestFailedError("the connection was lost", temporary=True)
    reason = getattr(cause, "strerror", None) or getattr(error, "strerror", None)
    problem = "the server cannot be reached" + (f": {reason}" if reason else "")
    return RequestFailedError(problem, temporary=isinstance(error, (HTTPError, OSError)), unreached=True)


def _tls_failure(error: SSLError) -> RequestFailedError:
    import ssl

    reason = next((each for each in (*error.args, error.__cause__) if isinstance(each, ssl.SSLError)), None)
    if isinstance(reason, ssl.SSLCertVerificationError):
        problem = f"the certificate of the server is not trusted: {reason.verify_message}"
        advice = "Check the address, or pass the certificates to trust: verify='certificates.pem'."
        return RequestFailedError(problem, temporary=False, advice=advice)
    text = re.sub(r"[^A-Z0-9_]", "", reason.reason or "") if reason is not None else ""
    if text in _PLAIN_TEXT:
        problem, advice = "the server does not answer with TLS", "Use http:// if the server has no certificate."
        return RequestFailedError(problem, temporary=False, advice=advice)
    return RequestFailedError(f"the TLS connection failed{f': {text}' if text else ''}", temporary=True)
