"""State that the objects of one server share: whether it was reached, and how many requests it takes at once.

A server that answers 429 or 503 gets half as many requests at once; after enough answers one more is tried, and so on
(additive increase, multiplicative decrease, as in TCP).
"""

from __future__ import annotations

import os
import re
import threading
import weakref

from sluice import _defaults as defaults
from sluice.sources.remote.protocol import RequestFailedError

__all__ = ["Server", "server_of"]

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
        self._changed = threading.Condition()

    def begin(self) -> int:
        """Wait until there may be one more request; return the round to which it belongs, for ``end``."""
        with self._changed:
            if self.limit is not None:
                self._changed.wait_for(self._has_room, defaults.REMOTE_TURN_SECONDS)
            self._active += 1
            return self._round

    def end(self, began_in: int, error: RequestFailedError | None) -> None:
        """Count the end of a request.

        Args:
            began_in: What ``begin`` returned. Of requests that were refused together, one halves the limit.
            error: Why it failed; None if it did not.
        """
        with self._changed:
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
            self._changed.notify_all()

    def start_anew(self) -> None:
        """Forget requests and locks after a fork: they are those of the parent process."""
        self._changed = threading.Condition()
        self._active = 0

    def _has_room(self) -> bool:
        return self.limit is None or self._active < self.limit


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
