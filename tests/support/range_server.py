"""An HTTP server on the loopback address that answers ranges, with a script of faults by the number of the request.

::

    with RangeServer({"/model.pth": content}, faults={3: reset(after=100)}) as server:
        load(server.url("/model.pth"))
    assert server.requests[0].headers["Range"] == "bytes=0-65535"
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import shlex
import socket
import ssl
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.message import Message
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal, Self

import pytest

_SLICE = 64 << 10

#: Bytes at each end of a file that make its ETag.
_HASHED = 4096


@dataclass(frozen=True)
class Request:
    """One request that arrived."""

    path: str
    #: Names are found in any case.
    headers: Message


@dataclass(frozen=True)
class Answer:
    """One answer, before it is sent."""

    status: int
    headers: dict[str, str]
    body: bytes | memoryview = b""
    #: Bytes of the body that are sent; None for all of it.
    sent: int | None = None
    #: How the answer ends.
    end: Literal["keep", "close", "reset", "stall", "drip"] = "keep"
    #: The object that was asked for.
    whole: bytes = b""
    #: Whether the body is sent without its size, in chunks.
    chunked: bool = False


Fault = Callable[[Answer], Answer]


def status(code: int, **headers: str) -> Fault:
    """Return a fault: another status; ``Retry_After="1"`` is the header Retry-After."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda _: Answer(status=code, headers={"Content-Length": "0", **named})


def cut(after: int, end: Literal["close", "reset", "stall", "drip"]) -> Fault:
    """Return a fault: the body ends after some bytes, or continues byte by byte."""
    return lambda answer: replace(answer, sent=after, end=end)


def headers(**changed: str) -> Fault:
    """Return a fault: other headers; an empty one is left out."""
    named = {name.replace("_", "-"): value for name, value in changed.items()}
    return lambda answer: replace(
        answer, headers={name: value for name, value in {**answer.headers, **named}.items() if value}
    )


def moved(location: str, code: int = 302) -> Fault:
    """Return a fault: a redirect."""
    return status(code, Location=location)


def whole(answer: Answer) -> Answer:
    """Send the whole object in place of a range."""
    kept = {name: value for name, value in answer.headers.items() if name != "Content-Range"}
    return replace(answer, status=200, headers={**kept, "Content-Length": str(len(answer.whole))}, body=answer.whole)


def compressed(answer: Answer) -> Answer:
    """Say that the body is compressed."""
    return replace(answer, headers={**answer.headers, "Content-Encoding": "gzip"})


def shifted(answer: Answer) -> Answer:
    """Declare a range that begins one byte later."""
    first, last, total = map(int, re.findall(r"\d+", answer.headers["Content-Range"]))
    moved_range = f"bytes {first + 1}-{last + 1}/{total}"
    return replace(answer, headers={**answer.headers, "Content-Range": moved_range})


def chunked(answer: Answer) -> Answer:
    """Send the body in chunks, without its size."""
    kept = {name: value for name, value in answer.headers.items() if name != "Content-Length"}
    return replace(answer, headers={**kept, "Transfer-Encoding": "chunked"}, chunked=True)


@dataclass
class RangeServer:
    """The server, which runs in a ``with`` block."""

    files: dict[str, bytes]
    #: Faults by the number of the request, from 0.
    faults: Mapping[int, Fault] = field(default_factory=dict)
    #: A fault of every request that has none of its own.
    always: Fault | None = None
    #: Seconds before each answer, and bytes per second of each connection; None for no limit.
    latency: float = 0.0
    bandwidth: float | None = None
    #: Which validators an answer has.
    validators: Literal["strong", "weak", "modified", "none"] = "strong"
    #: Whether conditions of requests are ignored.
    ignores_conditions: bool = False
    #: File with certificate and key; None for plain text.
    certificate: Path | None = None
    #: Whether clients need this certificate too.
    asks_for_certificates: bool = False
    #: Requests that are answered at once; others get 503. None for no limit.
    most_at_once: int | None = None
    host: str = "127.0.0.1"
    requests: list[Request] = field(default_factory=list)
    #: Connections that were accepted.
    connections: int = 0

    def __enter__(self) -> Self:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._active = 0
        self._stopped = threading.Event()
        self._server = _Server((self.host, 0), _handler(self))
        if self.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self.certificate)
            if self.asks_for_certificates:
                context.load_verify_locations(self.certificate)
                context.verify_mode = ssl.CERT_REQUIRED
            self._server.socket = context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), name="range-server")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._stopped.set()
        self.drop_connections()
        self._server.server_close()

    def url(self, path: str, *, host: str | None = None, credentials: str = "") -> str:
        scheme = "http" if self.certificate is None else "https"
        return f"{scheme}://{credentials}{host or self.host}:{self._server.server_address[1]}{path}"

    def drop_connections(self) -> None:
        """Break every connection."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    @contextlib.contextmanager
    def place(self) -> Iterator[bool]:
        """Count a request while it is answered; yield whether the limit allows it."""
        with self._lock:
            self._active += 1
            free = self.most_at_once is None or self._active <= self.most_at_once
        try:
            yield free
        finally:
            with self._lock:
                self._active -= 1

    def answer(self, request: Request) -> Answer:
        """Return the right answer, or the one of the script."""
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
        fault = self.faults.get(number, self.always)
        right = self._right(request)
        return right if fault is None else fault(right)

    def _right(self, request: Request) -> Answer:
        content = self.files.get(request.path.partition("?")[0])
        if content is None:
            return Answer(status=404, headers={"Content-Length": "0"})
        validators = self._validators(content)
        tag, modified = validators.get("ETag"), validators.get("Last-Modified")
        asked = request.headers
        if not self.ignores_conditions and (
            asked.get("If-Match", tag) != tag or asked.get("If-Unmodified-Since", modified) != modified
        ):
            return Answer(status=412, headers={"Content-Length": "0"})
        range_ = re.fullmatch(r"bytes=(\d+)-(\d+)", asked.get("Range", ""))
        if range_ is None:
            return Answer(200, {**validators, "Content-Length": str(len(content))}, content, whole=content)
        first, last = int(range_[1]), min(int(range_[2]), len(content) - 1)
        if first >= len(content):
            return Answer(416, {"Content-Range": f"bytes */{len(content)}", "Content-Length": "0"})
        body = memoryview(content)[first : last + 1]
        said = {"Content-Range": f"bytes {first}-{last}/{len(content)}", "Content-Length": str(len(body))}
        return Answer(206, {**validators, **said}, body, whole=content)

    def _validators(self, content: bytes) -> dict[str, str]:
        digest = hashlib.sha256(content[:_HASHED] + content[-_HASHED:]).hexdigest()[:16]
        modified = {"Last-Modified": formatdate(int(digest[:7], 16), usegmt=True)}
        tags = {"strong": {"ETag": f'"{digest}"'} | modified, "weak": {"ETag": f'W/"{digest}"'}, "modified": modified}
        return tags.get(self.validators, {})

    def send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        """Send an answer at the speed of the server, and end as it says."""
        self._stopped.wait(self.latency)
        handler.send_response(answer.status)
        for name, value in answer.headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        body = memoryview(answer.body)[: answer.sent]
        for at in range(0, len(body), _SLICE):
            part = body[at : at + _SLICE]
            handler.wfile.write(b"%x\r\n%b\r\n" % (len(part), bytes(part)) if answer.chunked else part)
            if self.bandwidth is not None:
                self._stopped.wait(len(part) / self.bandwidth)
        if answer.chunked and answer.end == "keep":
            handler.wfile.write(b"0\r\n\r\n")
        if answer.end == "stall":
            self._stopped.wait()
        if answer.end == "drip":
            for at in range(len(body), len(answer.body)):
                handler.wfile.write(answer.body[at : at + 1])
                self._stopped.wait(0.05)
        if answer.end == "reset":
            handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if answer.end != "keep":
            handler.close_connection = True

    def track(self, connection: socket.socket, *, opened: bool) -> None:
        """Count a connection, or forget it."""
        with self._lock:
            self.connections += opened
            (self._open.add if opened else self._open.discard)(connection)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # joined by server_close
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without the look-up of a name that ``HTTPServer`` makes."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def shutdown_request(self, request: socket.socket | tuple[bytes, socket.socket]) -> None:
        """Close without the orderly end that would come before a reset."""
        assert isinstance(request, socket.socket)
        request.close()

    def handle_error(self, request: object, client_address: object) -> None:
        """Expect clients to go away."""


def _handler(server: RangeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        wbufsize = 0
        disable_nagle_algorithm = True

        def setup(self) -> None:
            super().setup()
            server.track(self.connection, opened=True)

        def finish(self) -> None:
            server.track(self.connection, opened=False)
            with contextlib.suppress(OSError):
                super().finish()

        def do_GET(self) -> None:
            with server.place() as free:
                answer = server.answer(Request(self.path, self.headers))
                server.send(self, answer if free else status(503)(answer))

        def log_message(self, *arguments: object) -> None:
            """Log nothing."""

    return Handler


def make_certificate(directory: Path) -> Path:
    """Return a file with a certificate for the loopback address and its key; skip the test without openssl."""
    made = directory / "certificate.pem"
    try:
        subprocess.run(
            shlex.split(
                "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=127.0.0.1"
                " -addext subjectAltName=IP:127.0.0.1 -keyout key.pem -out only.pem"
            ),
            cwd=directory,
            check=True,
            capture_output=True,
            timeout=60,
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("openssl is not installed")
    made.write_bytes((directory / "only.pem").read_bytes() + (directory / "key.pem").read_bytes())
    return made
