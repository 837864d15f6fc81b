"""Threads that end with the call that started them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence

from sluice import _options as options

__all__ = ["Worker", "join_threads", "start_threads"]


class Worker(threading.Thread):
    """A thread that says by itself when its work has ended.

    ``Thread.join`` cannot be trusted once a signal has interrupted it: up to Python 3.12 it then takes a thread that
    is still running for one that has ended. Nor can ``Event`` and ``Condition`` be waited for in the thread that
    signals interrupt: between taking their lock and using it they are Python, and an interrupt there keeps it taken.
    Entering a bare lock is one step.
    """

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = work
        self._process = os.getpid()
        self._running = threading.Lock()
        self._running.acquire()
        self._ended = False

    def run(self) -> None:
        """Do the work."""
        try:
            self._work()
        finally:
            del self._work  # it may hold this thread, and in such a circle every tensor of a load
            self._ended = True
            self._running.release()

    @property
    def unfinished(self) -> bool:
        """Whether it was started and goes on; not in the child of a fork, which has no other threads."""
        if self.ident is None or os.getpid() != self._process:
            return False
        return not self._ended or self.is_alive()

    def forget(self) -> None:
        """Let go of the work, which will not be done: an interrupt came before the thread was made.

        Python keeps such a thread in its list for ever.
        """
        self._work = _nothing

    def finish(self) -> None:
        """Wait for its end."""
        with self._running:
            pass
        self.join()


def _nothing() -> None:
    """Do no work."""


def start_threads(threads: list[Worker], count: int, work: Callable[[], None], name: str) -> None:
    """Start ``count`` threads and add them to ``threads``; fewer where the process may start no more of them.

    Args:
        threads: Gets each thread before it starts, because an interrupt can come as soon as it runs.
        count: How many.
        work: What each does; it must not raise.
        name: Their names begin with it.
    """
    for number in range(count):
        thread = Worker(work, f"{name}-{number}")
        threads.append(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # a limit on threads, or no room for a stack
            threads.pop()
            return


def join_threads(threads: Sequence[Worker]) -> None:
    """Join threads, also when the caller is interrupted meanwhile: that is raised once all of them have ended."""
    interrupt: BaseException | None = None
    for thread in threads:
        deadline = time.monotonic() + options.THREAD_START_SECONDS
        # Interrupted while it was started, a thread may be on its way and not yet known to be alive.
        while thread.ident is None and thread in threading.enumerate() and time.monotonic() < deadline:
            time.sleep(0.001)
        if thread.ident is None:
            thread.forget()
        while thread.unfinished:
            try:
                thread.finish()
            except BaseException as error:  # noqa: BLE001  (a signal handler may raise anything)
                interrupt = error
    if interrupt is not None:
        raise interrupt
