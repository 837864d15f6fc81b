"""Threads that end with the call that started them."""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = ["join_threads", "start_threads"]


def start_threads(threads: list[threading.Thread], count: int, work: Callable[[], None], name: str) -> None:
    """Start ``count`` threads and add them to ``threads``; fewer where the process may start no more of them.

    Args:
        threads: Gets each thread as soon as it runs, so that whoever joins the list also joins after an interrupt.
        count: How many.
        work: What each does; it must not raise.
        name: Their names begin with it.
    """
    for number in range(count):
        thread = threading.Thread(target=work, name=f"{name}-{number}", daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # a limit on threads, or no room for a stack
            return
        threads.append(thread)


def join_threads(threads: list[threading.Thread]) -> None:
    """Wait for all threads and empty the list, also when the caller is interrupted meanwhile.

    What they write into may be given back afterwards. An interrupt is raised when the last of them has ended.
    """
    interrupt: BaseException | None = None
    while threads:
        try:
            threads[-1].join()
            threads.pop()
        except BaseException as error:  # noqa: BLE001  (raised again below)
            interrupt = error
    if interrupt is not None:
        raise interrupt
