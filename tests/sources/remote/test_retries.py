"""Attempts: pauses, limits, and answers that are too slow; time is simulated. Requests that a server takes at once."""

from __future__ import annotations

import gc
import sys
import threading
import time as clock
from collections.abc import Callable
from typing import Any

import pytest

from sluice import _defaults as defaults
from sluice._errors import RemoteError
from sluice._threads import stops_when
from sluice.sources.remote.protocol import RequestFailedError, WrongResponseError
from sluice.sources.remote.retries import Attempts, Server, Speed, TooSlowError, pause_seconds, server_of, wait
from support.waiting import SkippedTime

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


def test_an_interrupt_leaves_no_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signals are handled when a function of Python begins or ends, also in the middle of entering a ``Condition``."""
    server = Server()
    server.end(server.begin(), BUSY)
    monkeypatch.setattr(defaults, "REMOTE_TURN_SECONDS", 0.0)
    tracing, left = sys.gettrace(), 0

    def interrupting(_frame: object, event: str, _: object) -> Any:
        nonlocal left
        left -= event != "line"
        if left == 0:
            raise KeyboardInterrupt
        return interrupting

    for position in range(1, 20):
        left = position
        sys.settrace(interrupting)
        try:
            server.end(server.begin(), None)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracing)
        other = threading.Thread(target=lambda: server.end(server.begin(), None), daemon=True)
        other.start()
        other.join(20)
        assert not other.is_alive()


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


FAILED = RequestFailedError("it failed", temporary=True)


def repeat(attempt: Callable[[], None]) -> None:
    """Attempt something until it is given up."""
    while True:
        attempt()


@pytest.fixture
def time() -> SkippedTime:
    return SkippedTime()


@pytest.fixture
def attempts(time: SkippedTime) -> Attempts:
    return Attempts("http://h/x", 7, sleep=time.sleep, clock=time, server=Server())


@pytest.mark.parametrize("reached", [True, False])
def test_patience_is_two_minutes_unless_the_server_was_never_reached(time: SkippedTime, reached: bool) -> None:
    server = Server()
    server.reached = reached
    attempts = Attempts("http://h/x", 7, sleep=time.sleep, clock=time, server=server)
    began, error = time.now, RequestFailedError("it failed", temporary=True, unreached=True)
    with pytest.raises(RemoteError, match=r"http://h/x, byte 7: it failed after \d+ tries in (120|10) s") as caught:
        repeat(lambda: attempts.failed(error, defaults.REMOTE_PROGRESS_BYTES - 1))
    assert caught.value.__cause__ is error
    assert time.now - began == pytest.approx(120 if reached else 10)


def test_bytes_begin_the_time_anew(attempts: Attempts, time: SkippedTime) -> None:
    for _ in range(100):
        time.now += defaults.REMOTE_PATIENCE_SECONDS / 2
        attempts.failed(FAILED, defaults.REMOTE_PROGRESS_BYTES)
    time.now += defaults.REMOTE_PATIENCE_SECONDS + 1
    with pytest.raises(RemoteError, match="after 101 tries"):
        attempts.failed(FAILED, 0)


def test_slow_answers_are_not_progress(attempts: Attempts, time: SkippedTime) -> None:
    attempts.failed(TooSlowError(), defaults.REMOTE_PROGRESS_BYTES)
    time.now += defaults.REMOTE_PATIENCE_SECONDS
    with pytest.raises(RemoteError, match="after 2 tries"):
        attempts.failed(TooSlowError(), defaults.REMOTE_PROGRESS_BYTES)


def test_answers_that_contradict_the_request_are_given_up_soon(attempts: Attempts) -> None:
    for _ in range(defaults.REMOTE_WRONG_ANSWERS - 1):
        attempts.failed(WrongResponseError("no range"), 0)
    with pytest.raises(RemoteError, match="no range after 3 tries"):
        attempts.failed(WrongResponseError("no range"), 0)


def test_a_call_that_has_ended_waits_for_no_server() -> None:
    ended = threading.Event()
    failures: list[RemoteError] = []

    def work() -> None:
        stops_when(ended.is_set)
        attempts = Attempts("http://h/x", 7, sleep=wait, clock=clock.monotonic, server=Server())
        busy = RequestFailedError("busy", temporary=True, retry_after=60.0)
        try:
            repeat(lambda: attempts.failed(busy, 0))
        except RemoteError as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    ended.set()
    thread.join(30)
    assert len(failures) == 1


def test_the_server_says_how_long_to_wait(attempts: Attempts, time: SkippedTime) -> None:
    attempts.failed(RequestFailedError("busy", temporary=True, retry_after=30.0), 0)
    assert time.pauses[0] >= 30
    with pytest.raises(RemoteError, match="it asks to wait 3600 s"):
        attempts.failed(RequestFailedError("busy", temporary=True, retry_after=3600.0), 0)
    assert len(time.pauses) == 1


def test_pauses_grow_to_a_limit_and_differ() -> None:
    for failures in (0, 3, 50):
        longest = min(defaults.REMOTE_LONGEST_PAUSE, defaults.REMOTE_FIRST_PAUSE * 2**failures)
        found = [pause_seconds(failures, None) for _ in range(200)]
        assert 0 <= min(found) < longest / 2 < max(found) <= longest


def test_an_answer_that_trickles_is_too_slow(time: SkippedTime) -> None:
    speed = Speed(time)
    for _ in range(100):  # fast enough, for a long time
        time.now += defaults.REMOTE_SLOW_SECONDS
        speed.received(int(defaults.REMOTE_SLOW_SECONDS * defaults.REMOTE_SLOWEST_BYTES))
    for _ in range(int(defaults.REMOTE_SLOW_SECONDS) - 1):
        time.now += 1
        speed.received(defaults.REMOTE_SLOWEST_BYTES - 1)
    time.now += 1
    with pytest.raises(TooSlowError, match=r"less than 4\.00 KiB/s for 20 s"):
        speed.received(defaults.REMOTE_SLOWEST_BYTES - 1)
