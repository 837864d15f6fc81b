"""Answers that are received as they arrive, in the memory of the caller."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing, suppress

import pytest

pytest.importorskip("urllib3", reason="the extra 'remote' is not installed")

from sluice import _defaults as defaults
from sluice._threads import stops_when
from sluice.sources.remote import http_pools
from sluice.sources.remote.http import HttpObject
from sluice.sources.remote.location import Remote
from sluice.sources.remote.protocol import RequestFailedError
from support.range_server import RangeServer, cut
from support.waiting import wait_until

CONTENT = bytes(range(100))


def test_a_read_returns_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server never sends the rest; a read that waited for it would fail."""
    monkeypatch.setattr(http_pools, "_READ_SECONDS", 0.0)
    with RangeServer({"/m": CONTENT}, always=cut(5, "stall")) as server:
        remote = HttpObject(server.url("/m"))
        buffer = memoryview(bytearray(50))
        with remote.open_first(100)[1] as body:
            assert body.readinto(buffer) == 5
        remote.close()
    assert bytes(buffer[:6]) == CONTENT[:5] + b"\0"


@pytest.mark.parametrize("after", [0, 5])
def test_a_server_that_stalls_is_not_waited_for_after_the_end_of_the_call(
    monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    monkeypatch.setattr(http_pools, "_STEP_SECONDS", 0.02)
    ended = threading.Event()
    failures: list[RequestFailedError] = []
    with RangeServer({"/m": CONTENT}, always=cut(after, "stall")) as server, closing(HttpObject(server.url("/m"))) as m:

        def read() -> None:
            stops_when(ended.is_set)
            buffer = memoryview(bytearray(50))
            with m.open_first(100)[1] as body:
                try:
                    while body.readinto(buffer):
                        pass
                except RequestFailedError as error:
                    failures.append(error)

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


def test_bytes_before_a_failure_are_kept() -> None:
    with RangeServer({"/m": CONTENT}, always=cut(5, "stall")) as server:
        remote = HttpObject(Remote(server.url("/m"), timeout=0.5))
        buffer = memoryview(bytearray(50))
        with remote.open_first(100)[1] as body:
            assert body.readinto(buffer) == 5
            began = time.monotonic()
            with pytest.raises(RequestFailedError, match=r"the connection was lost|sent nothing"):
                body.readinto(buffer)
            assert time.monotonic() < began + 0.4  # the timeout has passed already
        remote.close()


def test_bytes_are_written_to_the_memory_of_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[object] = []
    real = http_pools._PromptResponse.read

    def read(response: http_pools._PromptResponse, amt: int | None = None) -> bytes:
        received.append(real(response, amt))
        return received[-1]  # type: ignore[return-value]  # what the real one returns

    monkeypatch.setattr(http_pools._PromptResponse, "read", read)
    with RangeServer({"/m": CONTENT}) as server:
        remote = HttpObject(server.url("/m"))
        memory = bytearray(100)
        with remote.open_first(100)[1] as body:
            assert body.readinto(memoryview(memory)) == 100
        remote.close()
    (data,) = received
    assert isinstance(data, memoryview)
    assert data.obj is memory
