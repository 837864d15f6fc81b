"""Threads that end with the call that started them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from sluice import _options as options

__all__ = ["join_threads", "start_threads"]


def start_threads(threads: list[threading.Thread], count: int, work: Callable[[], None], name: str) -> None:
    """Start ``count`` threads and add them to ``threads``; fewer where the process may start no more of them.

    Args:
        threads: Gets each thread before it starts, because an interrupt can come as soon as it runs.
        count: How many.
        work: What each does; it must not raise.
        name: Their names begin with it.
    """
    for number in range(count):
        thread = threading.Thread(target=work, name=f"{name}-{number}", daemon=True)
        threads.append(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # a limit on threads, or no room for a stack
            threads.pop()
            return


def join_threads(threads: Sequence[threading.Thread]) -> None:
    """Join threads, also when the caller is interrupted meanwhile: that is raised once all of them have ended."""
    interrupt: BaseException | None = None
    for thread in threads:
        deadline = time.monotonic() + options.THREAD_START_SECONDS
        # Interrupted while it was started, a thread may be on its way and not yet known to be alive.
        while thread.ident is None and thread in threading.enumerate() and time.monotonic() < deadline:
            time.sleep(0.001)
        while thread.is_alive():
            try:
                thread.join()
            except BaseException as error:  # noqa: BLE001  (a signal handler may raise anything)
                interrupt = error
    if interrupt is not None:
        raise interrupt
