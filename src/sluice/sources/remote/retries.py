"""Retry policy: which failures, pauses and limits; which responses are too slow; and the state of servers.

A server that answers 429 or 503 gets half as many requests at once; after enough answers one more is tried, and so on
(additive increase, multiplicative decrease, as in TCP).
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeVar

from sluice import _defaults as defaults
from sluice._errors import RemoteError
from sluice._threads import stopping
from sluice._units import format_bytes
from sluice.sources.remote.protocol import RequestFailedError, WrongResponseError

__all__ = ["Attempts", "Server", "Speed", "TooSlowError", "pause_seconds", "server_of", "wait"]

#: Statuses with which a server says that it gets too many requests.
_BUSY = frozenset({429, 503})


class Server:
    """One server.

    Attributes:
        reached: Whether a connection to it was ever made.
        limit: Requests at once; None as long as it has refused none.
    """

    def __init__(self) -> None:
        self.reached = False
        self.limit: int | None = None
        self._active = self._answers = self._round = 0
        self._lock = threading.Lock()  # interrupts leave the lock of a ``Condition`` locked; see ``Worker``

    def begin(self) -> int:
        """Wait until there may be one more request; return the round to which it belongs, for ``end``."""
        until = time.monotonic() + defaults.REMOTE_TURN_SECONDS
        while True:
            with self._lock:
                free = self.limit is None or self._active < self.limit
                if free or stopping() or time.monotonic() >= until:
                    self._active += 1
                    return self._round
            time.sleep(0.01)

    def end(self, began_in: int, error: RequestFailedError | None) -> None:
        """Count the end of a request.

        Args:
            began_in: What ``begin`` returned. Of requests that were refused together, one halves the limit.
            error: Why it failed; None if it did not.
        """
        with self._lock:
            self.reached |= error is None or not error.unreached
            if error is not None and error.status in _BUSY:
                if began_in == self._round:
                    self.limit, self._answers = max(1, self._active // 2), 0
                    self._round += 1
            elif self.limit is not None and error is None:
                self._answers += 1
                if self._answers >= defaults.REMOTE_ANSWERS_FOR_MORE * self.limit:
                    self.limit, self._answers = self.limit + 1, 0
            self._active -= 1

    def start_anew(self) -> None:
        """Forget requests and locks after a fork: they are those of the parent process."""
        self._lock = threading.Lock()
        self._active = 0


def server_of(address: str) -> Server:
    """Return the server of an address: all addresses with the same scheme and host share one."""
    found = re.match(r"[^/]*//[^/]*", address)
    name = found[0] if found else address
    with _lock:
        return _SERVERS.setdefault(name, Server())


def _after_fork() -> None:
    global _lock  # noqa: PLW0603  (a thread of the parent process may hold it)
    _lock = threading.Lock()
    for server in list(_SERVERS.values()):
        server.start_anew()


_lock = threading.Lock()
#: As long as one of their objects is in use.
_SERVERS: weakref.WeakValueDictionary[str, Server] = weakref.WeakValueDictionary()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


_Response = TypeVar("_Response")

#: Doublings of the pause after which it is at its limit in any case.
_DOUBLINGS = 16

#: Seconds after which a pause looks whether it is still needed.
_NAP_SECONDS = 0.2


class TooSlowError(RequestFailedError):
    """An answer arrives more slowly than a working connection is."""

    def __init__(self) -> None:
        slowest = format_bytes(defaults.REMOTE_SLOWEST_BYTES)
        problem = f"the server sent less than {slowest}/s for {defaults.REMOTE_SLOW_SECONDS:g} s"
        super().__init__(problem, temporary=True)


class Speed:
    """The speed of one answer, measured over periods of ``REMOTE_SLOW_SECONDS``.

    A timeout does not end an answer that arrives byte by byte.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = self._last = clock()
        self._nbytes = 0

    def resume(self) -> None:
        """Leave out the time since the last bytes, in which none were awaited."""
        now = self._clock()
        self._since, self._last = self._since + now - self._last, now

    def received(self, nbytes: int) -> None:
        """Count some bytes.

        Raises:
            TooSlowError: They are too few for the time.
        """
        self._nbytes += nbytes
        self._last = self._clock()
        seconds = self._last - self._since
        if seconds < defaults.REMOTE_SLOW_SECONDS:
            return
        if self._nbytes < seconds * defaults.REMOTE_SLOWEST_BYTES:
            raise TooSlowError
        self._since, self._nbytes = self._since + seconds, 0


class Attempts:
    """The attempts at one range.

    It is given up after ``REMOTE_PATIENCE_SECONDS`` of attempts that brought nothing worth mentioning. So a server that
    is away for a minute, or that breaks every connection, slows a load down, and a load ends.
    """

    def __init__(
        self,
        path: str,
        offset: int | None,
        *,
        sleep: Callable[[float], None],
        clock: Callable[[], float],
        server: Server,
    ) -> None:
        self._path, self._offset, self._sleep, self._clock, self._server = path, offset, sleep, clock, server
        self._began = self._last = clock()
        self._failures = self._in_a_row = self._wrong = 0

    def repeat(self, request: Callable[[], _Response]) -> _Response:
        """Make a request until it succeeds; what it brings otherwise is of no use.

        Raises:
            RemoteError: It failed too often.
        """
        while True:
            failure, began_in = None, self._server.begin()
            try:
                return request()
            except RequestFailedError as error:
                failure = error
            finally:
                self._server.end(began_in, failure)
            self.failed(failure, 0)

    def failed(self, error: RequestFailedError, received: int) -> None:
        """Wait before the next attempt.

        Args:
            error: Why the last one failed.
            received: Bytes that it brought.

        Raises:
            RemoteError: There is no next one.
        """
        now = self._clock()
        self._failures += 1
        if received >= defaults.REMOTE_PROGRESS_BYTES and not isinstance(error, TooSlowError):
            self._in_a_row, self._wrong, self._last = 0, 0, now
        pause = pause_seconds(self._in_a_row, error.retry_after)
        self._in_a_row += 1
        self._wrong += isinstance(error, WrongResponseError)
        unknown = error.unreached and not self._server.reached
        patience = defaults.REMOTE_UNREACHED_SECONDS if unknown else defaults.REMOTE_PATIENCE_SECONDS
        left = self._last + patience - now
        repeated = error.temporary and self._wrong < defaults.REMOTE_WRONG_ANSWERS and not stopping()
        if not repeated or left <= 0 or (error.retry_after or 0.0) >= left:
            raise self._given_up(error, now) from error
        self._sleep(min(pause, left))

    def _given_up(self, error: RequestFailedError, now: float) -> RemoteError:
        problem = error.problem
        if self._failures > 1:
            problem += f" after {self._failures} tries in {now - self._began:.0f} s"
        if error.retry_after:
            problem += f"; it asks to wait {error.retry_after:.0f} s"
        return RemoteError(problem, file=self._path, offset=self._offset, advice=error.advice)


def pause_seconds(failures: int, retry_after: float | None) -> float:
    """Return the pause before an attempt, random so that threads and processes do not return at the same time.

    Args:
        failures: Failures in a row before the last one.
        retry_after: Seconds that the server asks to wait, or None.
    """
    longest = min(defaults.REMOTE_LONGEST_PAUSE, defaults.REMOTE_FIRST_PAUSE * 2 ** min(failures, _DOUBLINGS))
    return (retry_after or 0.0) + random.uniform(0, longest)  # noqa: S311  (no secret)


def wait(seconds: float) -> None:
    """Sleep, but not for long after the call for which this thread works has ended."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0 and not stopping():
        time.sleep(min(left, _NAP_SECONDS))
