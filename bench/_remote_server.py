"""The server of ``bench.remote``: files by HTTP and as a bucket of S3, with the latency and the rate of a network.

The kernel sends the files (``sendfile``), so that the server takes little of the processor. All connections share one
rate. An answer begins after the latency, that of a new connection after twice the latency. Losses, and windows that
open slowly, are not imitated. Signatures are not checked.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.sax.saxutils import escape

import click
from msgspec import Struct

__all__ = ["Answer", "Link", "Request", "answer_to", "parse_request"]

#: Bytes that one connection sends at a time: the shares of connections are equal above that.
_CHUNK_BYTES = 256 << 10

#: Seconds that the link may catch up, because a sleep takes longer than asked.
_CATCH_UP_SECONDS = 0.002

#: Path that returns what was counted since the last time, without latency.
COUNTS = "/-/counts"


class Request(Struct, frozen=True, kw_only=True):
    """Head of a request."""

    method: str
    path: str
    query: dict[str, str]
    #: By name in lower case.
    headers: dict[str, str]


class Answer(Struct, frozen=True, kw_only=True):
    """An answer: bytes, or a range of a file."""

    status: str
    headers: dict[str, str]
    content: bytes = b""
    file: Path | None = None
    begin: int = 0
    nbytes: int = 0


class Link:
    """A line of some rate, which all connections share."""

    def __init__(
        self, rate: float, *, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        """Take bytes per second, 0 for no limit."""
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._lock, self._free = threading.Lock(), 0.0

    def wait(self, nbytes: int) -> None:
        """Wait until the line has carried the bytes."""
        if not self._rate:
            return
        with self._lock:
            now = self._clock()
            self._free = max(self._free, now - _CATCH_UP_SECONDS) + nbytes / self._rate
            pause = self._free - now
        if pause > 0:
            self._sleep(pause)


class _Counts:
    def __init__(self) -> None:
        self._lock, self._requests, self._bytes, self._cpu = threading.Lock(), 0, 0, time.process_time()

    def add(self, nbytes: int) -> None:
        with self._lock:
            self._requests += 1
            self._bytes += nbytes

    def take(self) -> bytes:
        with self._lock:
            cpu = time.process_time()
            taken = {"requests": self._requests, "bytes": self._bytes, "cpu": cpu - self._cpu}
            self._requests, self._bytes, self._cpu = 0, 0, cpu
        return json.dumps(taken).encode()


def parse_request(head: bytes) -> Request:
    """Return the parts of the head of a request."""
    first, *lines = head.decode("latin-1").split("\r\n")
    method, target, _ = first.split(" ", 2)
    if "://" in target:  # the whole address, as the client of Run:ai writes it
        target = "/" + target.partition("://")[2].partition("/")[2]
    path, _, query = target.partition("?")
    pairs = (line.partition(":") for line in lines if line)
    return Request(
        method=method,
        path=urllib.parse.unquote(path),
        query=dict(urllib.parse.parse_qsl(query, keep_blank_values=True)),
        headers={name.strip().lower(): value.strip() for name, _, value in pairs},
    )


def answer_to(request: Request, root: Path) -> Answer:
    """Return the answer to a request for a file below ``root``, or for the listing of a bucket, a folder of it."""
    path = root / request.path.strip("/")
    if request.method not in {"GET", "HEAD"}:
        return Answer(status="405 Method Not Allowed", headers={})
    if path.is_dir():
        content = _listing(path, request.query.get("prefix", "")) if request.query.get("list-type") == "2" else b""
        return Answer(status="200 OK", headers={"Content-Type": "application/xml"}, content=content)
    if ".." in path.parts or not path.is_file():
        content = b"<Error><Code>NoSuchKey</Code></Error>"
        return Answer(status="404 Not Found", headers={"Content-Type": "application/xml"}, content=content)
    total = path.stat().st_size
    headers = {
        "ETag": _etag(path),
        "Last-Modified": time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(path.stat().st_mtime)),
        "Accept-Ranges": "bytes",
        "Content-Type": "application/octet-stream",
    }
    if request.headers.get("if-match", headers["ETag"]) not in {headers["ETag"], "*"}:
        return Answer(status="412 Precondition Failed", headers={})
    asked = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("range", ""))
    if request.method == "HEAD" or asked is None or asked.group() == "bytes=-":
        return Answer(status="200 OK", headers=headers, file=path, nbytes=total)
    begin, end = asked.groups()
    first = int(begin) if begin else max(0, total - int(end))
    last = min(int(end), total - 1) if begin and end else total - 1
    if first > last:
        return Answer(status="416 Range Not Satisfiable", headers={"Content-Range": f"bytes */{total}"})
    headers["Content-Range"] = f"bytes {first}-{last}/{total}"
    return Answer(status="206 Partial Content", headers=headers, file=path, begin=first, nbytes=last - first + 1)


def _etag(path: Path) -> str:
    found = path.stat()
    return f'"{found.st_mtime_ns:x}-{found.st_size:x}"'


def _listing(bucket: Path, prefix: str) -> bytes:
    keys = sorted(str(each.relative_to(bucket)) for each in bucket.rglob("*") if each.is_file())
    contents = "".join(
        f"<Contents><Key>{escape(key)}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        f"<ETag>{escape(_etag(bucket / key))}</ETag><Size>{(bucket / key).stat().st_size}</Size>"
        "<StorageClass>STANDARD</StorageClass></Contents>"
        for key in keys
        if key.startswith(prefix)
    )
    text = (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{escape(bucket.name)}</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{contents.count('<Key>')}"
        f"</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{contents}</ListBucketResult>"
    )
    return text.encode()


class _Server:
    def __init__(self, root: Path, latency: float, rate: float) -> None:
        self._root, self._latency, self._link = root, latency, Link(rate)
        self._counts = _Counts()

    def serve(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            pause = 2 * self._latency
            for request in _requests(connection):
                if request.path == COUNTS:
                    counts = Answer(status="200 OK", headers={}, content=self._counts.take())
                    connection.sendall(_head(counts) + counts.content)
                    continue
                time.sleep(pause)
                pause = self._latency
                self._send(connection, answer_to(request, self._root), body=request.method != "HEAD")

    def _send(self, connection: socket.socket, answer: Answer, *, body: bool) -> None:
        sent = 0
        try:
            connection.sendall(_head(answer))
            if body and answer.file is None:
                connection.sendall(answer.content)
            elif body and answer.file is not None:
                with answer.file.open("rb") as file:
                    while sent < answer.nbytes:
                        chunk = min(_CHUNK_BYTES, answer.nbytes - sent)
                        self._link.wait(chunk)
                        sent += _send_file(connection, file.fileno(), answer.begin + sent, chunk)
        finally:
            self._counts.add(sent)


def _send_file(connection: socket.socket, file: int, offset: int, nbytes: int) -> int:
    sent = 0
    while sent < nbytes:
        sent += os.sendfile(connection.fileno(), file, offset + sent, nbytes - sent)
    return sent


def _head(answer: Answer) -> bytes:
    nbytes = len(answer.content) if answer.file is None else answer.nbytes
    lines = [f"HTTP/1.1 {answer.status}", *(f"{name}: {value}" for name, value in answer.headers.items())]
    return "\r\n".join([*lines, f"Content-Length: {nbytes}", "x-amz-request-id: 1", "", ""]).encode("latin-1")


def _requests(connection: socket.socket) -> Iterator[Request]:
    held = b""
    while True:
        while b"\r\n\r\n" not in held:
            found = connection.recv(64 << 10)
            if not found:
                return
            held += found
        head, _, held = held.partition(b"\r\n\r\n")
        yield parse_request(head)


@click.command()
@click.argument("root", type=click.Path(path_type=Path, exists=True))
@click.option("--latency", type=float, default=0.0, help="Seconds before each answer.")
@click.option("--rate", type=float, default=0.0, help="Bytes per second of all connections; 0: no limit.")
def main(root: Path, latency: float, rate: float) -> None:
    """Serve a folder on the loopback address until standard input ends; print the port."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    server = _Server(root.resolve(), latency, rate)
    threading.Thread(target=server.serve, args=(listener,), daemon=True).start()
    print(listener.getsockname()[1], flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
