"""Answers that are received as they arrive, in the memory of the caller, and who shares connections."""

from __future__ import annotations

import gc
import os
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")

from sluice import _defaults as defaults
from sluice._threads import in_threads, stops_when
from sluice.sources.remote import http_pools
from sluice.sources.remote.file import RemoteFile
from sluice.sources.remote.http import HttpObject
from sluice.sources.remote.location import Remote
from sluice.sources.remote.protocol import RequestFailedError
from support.range_server import RangeServer, cut
from support.waiting import wait_until

CONTENT = random.Random(17).randbytes(200_000)

#: Beyond the bytes that the opening request brings.
FAR = 100_000


@pytest.fixture
def server() -> Iterator[RangeServer]:
    with RangeServer({"/m": CONTENT}) as running:
        yield running


def test_a_read_returns_what_has_arrived(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server never sends the rest; a read that waited for it would fail."""
    monkeypatch.setattr(http_pools, "_READ_SECONDS", 0.0)
    server.always = cut(5, "stall")
    buffer = memoryview(bytearray(50))
    with closing(HttpObject(server.url("/m"))) as remote, remote.open_first(100)[1] as body:
        assert body.readinto(buffer) == 5
    assert bytes(buffer[:6]) == CONTENT[:5] + b"\0"


@pytest.mark.parametrize("after", [0, 5])
def test_a_server_that_stalls_is_not_waited_for_after_the_end_of_the_call(
    server: RangeServer, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(http_pools, "_STEP_SECONDS", 0.02)
    server.always = cut(after, "stall")
    ended = threading.Event()
    failures: list[RequestFailedError] = []

    def read() -> None:
        stops_when(ended.is_set)
        buffer = memoryview(bytearray(50))
        with remote.open_first(100)[1] as body:
            try:
                while body.readinto(buffer):
                    pass
            except RequestFailedError as error:
                failures.append(error)

    with closing(HttpObject(server.url("/m"))) as remote:
        thread = threading.Thread(target=read)
        thread.start()
        wait_until(lambda: server.requests, "a request")
        ended.set()
        thread.join(defaults.REMOTE_TIMEOUT_SECONDS / 2)
    assert len(failures) == 1


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 206 Partial Content\r\nX-Long: "], ids=["status", "header"])
def test_headers_that_never_end_are_given_up(monkeypatch: pytest.MonkeyPatch, start: bytes) -> None:
    """Each byte arrives long before the timeout of the connection."""
    monkeypatch.setattr(defaults, "REMOTE_HEADERS_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError):
                connection.sendall(start)
                while True:
                    connection.sendall(b"H")
                    time.sleep(0.002)

        server = threading.Thread(target=drip)
        server.start()
        remote = HttpObject(f"http://127.0.0.1:{listener.getsockname()[1]}/m")
        with pytest.raises(RequestFailedError, match="the headers of the answer take too long") as caught:
            remote.open_first(100)
        remote.close()
        server.join()
    assert caught.value.temporary


def test_bytes_before_a_failure_are_kept(server: RangeServer) -> None:
    server.always = cut(5, "stall")
    buffer = memoryview(bytearray(50))
    with closing(HttpObject(Remote(server.url("/m"), timeout=0.5))) as remote, remote.open_first(100)[1] as body:
        began = time.monotonic()
        assert body.readinto(buffer) == 5
        assert time.monotonic() < began + 10
        began = time.monotonic()
        with pytest.raises(RequestFailedError, match=r"the connection was lost|sent nothing"):
            body.readinto(buffer)
        assert time.monotonic() < began + 0.4  # the timeout has passed already


def test_bytes_are_written_to_the_memory_of_the_caller(server: RangeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[object] = []
    real = http_pools._PromptResponse.read

    def read(response: http_pools._PromptResponse, amt: int | None = None) -> bytes:
        received.append(real(response, amt))
        return received[-1]  # type: ignore[return-value]  # what the real one returns

    monkeypatch.setattr(http_pools._PromptResponse, "read", read)
    memory = bytearray(100)
    with closing(HttpObject(server.url("/m"))) as remote, remote.open_first(100)[1] as body:
        assert body.readinto(memoryview(memory)) == 100
    (data,) = received
    assert isinstance(data, memoryview)
    assert data.obj is memory


def test_a_read_and_its_connection_hold_nothing_of_an_answer(server: RangeServer) -> None:
    """An answer that is not read to its end takes its connection with it."""
    buffer = memoryview(bytearray(10))
    with closing(HttpObject(server.url("/m"))) as remote:
        facts, first = remote.open_first(100)
        with first:
            pass
        with remote.open_range(FAR, 10, facts) as body:
            assert [body.readinto(buffer), body.readinto(buffer)] == [10, 0]
        with remote.open_range(FAR, 10, facts) as body:
            assert body.readinto(buffer) == 10
    assert server.connections == 2
    assert bytes(buffer) == CONTENT[FAR : FAR + 10]


def opened(server: RangeServer) -> closing[RemoteFile]:
    return closing(RemoteFile(HttpObject(server.url("/m"))))


def test_threads_share_connections(server: RangeServer) -> None:
    found = set[bytes]()
    with opened(server) as one, opened(server) as other:
        read = lambda number: found.add((one, other)[number % 2].read_at(FAR + number // 2, 10_000))  # noqa: E731
        in_threads(read, 10, threads=10, name="reader")
        one.close()
        assert other.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
    assert found == {CONTENT[FAR + at : FAR + at + 10_000] for at in range(5)}
    assert server.connections <= 11


def test_a_file_that_nobody_closes_is_closed_when_it_is_collected(server: RangeServer) -> None:
    file = RemoteFile(HttpObject(server.url("/m")))
    assert file.read_at(0, 1) == CONTENT[:1]
    del file
    gc.collect()  # the test fails if descriptors remain


def test_a_forked_process_has_connections_of_its_own(server: RangeServer) -> None:
    with opened(server) as file:
        assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
        child = os.fork()
        if not child:
            right = file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
            os._exit(0 if right else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert server.connections == 2
        assert file.read_at(FAR, 9) == CONTENT[FAR : FAR + 9]
        assert server.connections == 2
