"""Bodies of HTTP answers, and the failures of urllib3 as failures of requests."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable
from types import TracebackType
from typing import Self

from urllib3 import BaseHTTPResponse
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    NameResolutionError,
    NewConnectionError,
    ProxyError,
    ReadTimeoutError,
    SSLError,
)

from sluice.sources.remote.http_pools import SlowHeadersError, receive
from sluice.sources.remote.protocol import RequestFailedError

__all__ = ["HttpBody", "discard", "request_failure"]

#: Most bytes received at a time, and from a body of unknown size. With 1 MiB the layers of urllib3 take a fifth of the
#: processor time; a slow server is noticed at any size, because reads return after a second.
_SLICE_BYTES, _RECEIVE_BYTES = 8 << 20, 16 << 10


#: Reasons of OpenSSL for an answer in plain text.
_PLAIN_TEXT = frozenset({"WRONG_VERSION_NUMBER", "HTTP_REQUEST", "HTTPS_PROXY_REQUEST", "UNKNOWN_PROTOCOL"})


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def readinto(self, buffer: memoryview) -> int:
        if not self._left:
            return 0
        found = self._received(buffer[: self._left])
        self._left -= found
        # The end of a body without a size is read too: more bytes would be those of a different answer.
        if found and not self._left and self._received(memoryview(bytearray(1))):
            raise RequestFailedError("the answer has more bytes than it should", temporary=False)
        return found

    def close(self) -> None:
        """Return the connection if the answer was read to its end; close it otherwise."""
        discard(self._response)

    def _received(self, buffer: memoryview) -> int:
        try:
            if self._response.length_remaining is not None:
                return receive(self._response, buffer[:_SLICE_BYTES])
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
    if isinstance(cause, SlowHeadersError):
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
