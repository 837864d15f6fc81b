"""Requests that a server takes at once: fewer after refusals, more again after answers; shared by its objects."""

from __future__ import annotations

import gc

import pytest

from sluice import _defaults as defaults
from sluice.sources.remote.protocol import RequestFailedError
from sluice.sources.remote.servers import Server, server_of

BUSY = RequestFailedError("busy", temporary=True, status=503)


def test_refusals_halve_the_requests_and_answers_add_one() -> None:
    server = Server()
    rounds = [server.begin() for _ in range(16)]
    for began_in in rounds[:12]:  # refused together
        server.end(began_in, BUSY)
    assert server.limit == 8
    for began_in in rounds[12:]:
        server.end(began_in, None)
    for expected in (9, 10):
        for _ in range(defaults.REMOTE_ANSWERS_FOR_MORE * (expected - 1)):
            server.end(server.begin(), None)
        assert server.limit in (expected, expected + 1)
    server.end(server.begin(), RequestFailedError("refused", temporary=True, status=429))
    assert server.limit == 1


def test_a_request_over_the_limit_waits_and_is_made_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder of the connection may wait for memory that the waiting request has."""
    monkeypatch.setattr(defaults, "REMOTE_TURN_SECONDS", 0.05)
    server = Server()
    server.end(server.begin(), BUSY)
    first = server.begin()
    second = server.begin()
    server.end(first, None)
    server.end(second, None)


def test_a_server_is_reached_by_any_answer() -> None:
    server = Server()
    server.end(server.begin(), RequestFailedError("refused", temporary=True, unreached=True))
    assert not server.reached
    server.end(server.begin(), BUSY)
    assert server.reached


def test_objects_of_one_server_share_it_while_they_are_in_use() -> None:
    server = server_of("https://host:1/a")
    assert server_of("https://host:1/b/c") is server
    assert server_of("https://host/a") is not server
    server.reached = True
    del server
    gc.collect()
    assert not server_of("https://host:1/a").reached
