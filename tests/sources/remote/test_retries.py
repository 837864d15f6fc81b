"""Attempts: pauses, limits, and answers that are too slow; time is simulated."""

from __future__ import annotations

import pytest

from sluice import _defaults as defaults
from sluice._errors import RemoteError
from sluice.sources.remote.protocol import RequestFailedError
from sluice.sources.remote.retries import Attempts, Speed, TooSlowError, pause_seconds


class Time:
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.pauses.append(seconds)


FAILED = RequestFailedError("it failed", temporary=True)


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def attempts(time: Time) -> Attempts:
    return Attempts("http://h/x", 7, sleep=time.sleep, clock=time)


def test_attempts_in_a_row_end(attempts: Attempts, time: Time) -> None:
    for _ in range(defaults.REMOTE_RETRIES):
        attempts.failed(FAILED, 0)
    with pytest.raises(RemoteError, match=r"http://h/x, byte 7: it failed after 7 tries in \d+ s") as caught:
        attempts.failed(FAILED, defaults.REMOTE_PROGRESS_BYTES - 1)
    assert caught.value.__cause__ is FAILED
    assert len(time.pauses) == defaults.REMOTE_RETRIES


def test_bytes_begin_the_count_anew(attempts: Attempts) -> None:
    for _ in range(100):
        attempts.failed(FAILED, defaults.REMOTE_PROGRESS_BYTES)
    for _ in range(defaults.REMOTE_RETRIES - 1):
        attempts.failed(FAILED, 0)
    with pytest.raises(RemoteError, match="after 106 tries"):
        attempts.failed(FAILED, 0)


def test_slow_answers_are_not_progress(attempts: Attempts) -> None:
    for _ in range(defaults.REMOTE_RETRIES):
        attempts.failed(TooSlowError(), defaults.REMOTE_PROGRESS_BYTES)
    with pytest.raises(RemoteError, match="after 7 tries"):
        attempts.failed(TooSlowError(), defaults.REMOTE_PROGRESS_BYTES)


def test_a_failure_that_stays_is_not_repeated(attempts: Attempts, time: Time) -> None:
    error = RequestFailedError("no", temporary=False, advice="Ask someone.")
    with pytest.raises(RemoteError, match=r"byte 7: no\. Ask someone\.$"):
        attempts.failed(error, 0)
    assert not time.pauses


def test_patience_ends(attempts: Attempts, time: Time) -> None:
    attempts.failed(FAILED, 0)
    time.now += defaults.REMOTE_PATIENCE_SECONDS
    with pytest.raises(RemoteError, match=r"after 2 tries in 12\d s"):
        attempts.failed(FAILED, 0)


def test_the_server_says_how_long_to_wait(attempts: Attempts, time: Time) -> None:
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


def test_an_answer_that_trickles_is_too_slow(time: Time) -> None:
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
