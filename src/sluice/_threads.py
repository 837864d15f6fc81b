"""Threads that are joined by the call or session that started them."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Generic, Self, TypeVar

from sluice import _defaults as defaults

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]  # the one name for both

__all__ = [
    "Task",
    "Worker",
    "Workers",
    "close_dropped",
    "in_threads",
    "join_threads",
    "spare_threads",
    "start_threads",
    "stopping",
    "stops_when",
]

_Result = TypeVar("_Result")


class Worker(threading.Thread):
    """A thread that records the end of its work in a lock.

    ``Thread.join`` is unreliable after a signal has interrupted it: up to Python 3.12 it then treats a running thread
    as finished. ``Event`` and ``Condition`` are not safe in the thread that receives signals: they are written in
    Python, and an interrupt between acquiring and using their lock leaves it locked. Entering a plain lock is atomic.
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
            del self._work  # it may refer to this thread; such a cycle would keep the tensors of a load alive
            self._ended = True
            self._running.release()

    @property
    def unfinished(self) -> bool:
        """Whether the thread was started and is running; False in the child of a fork, which has no other threads."""
        if self.ident is None or os.getpid() != self._process:
            return False
        return not self._ended or self.is_alive()

    def forget(self) -> None:
        """Release the work of a thread that never started because an interrupt came first.

        Python keeps such a thread in its list forever.
        """
        self._work = lambda: None

    def finish(self) -> None:
        """Wait until the thread has ended."""
        with self._running:
            pass
        self.join()


def spare_threads(count: int) -> int:
    """Return the number of threads, at most ``count``, that may run: 0 under a limit on virtual memory (RLIMIT_AS).

    The stack and malloc arena of a thread, 72 MiB, stay reserved after it ends and reduce the virtual memory that is
    left for the weights. And a thread without memory for its first steps ends before it signals that it has started,
    for which Python waits forever.
    """
    limited = resource is not None and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return 0 if limited else count


def start_threads(threads: list[Worker], count: int, work: Callable[[], None], name: str) -> None:
    """Start ``count`` threads and add them to ``threads``; fewer if the process may not start more.

    Args:
        threads: Receives each thread before it starts, because an interrupt can come as soon as it runs.
        count: Number of threads.
        work: Function that each thread runs; it must not raise.
        name: Prefix of the names of the threads.
    """
    for position in range(spare_threads(count)):
        thread = Worker(work, f"{name}-{position}")
        threads.append(thread)
        try:
            thread.start()
        except (RuntimeError, MemoryError):  # a limit on threads, or no room for a stack
            threads.pop()
            return


def join_threads(threads: Sequence[Worker]) -> None:
    """Join threads. An interrupt of the caller is raised after all of them have ended."""
    interrupt: BaseException | None = None
    for thread in threads:
        deadline = time.monotonic() + defaults.THREAD_START_SECONDS
        # After an interrupted start, a thread may be starting and not yet be alive.
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


def close_dropped(exits: ExitStack) -> None:
    """Close what a dropped object holds; one of its own threads, in which it may be collected, cannot join itself."""
    if isinstance(threading.current_thread(), Worker):
        threading.Thread(target=exits.close, name="sluice-close").start()
    else:
        exits.close()


def in_threads(work: Callable[[int], None], count: int, *, threads: int, name: str) -> None:
    """Call ``work`` with each number below ``count``, in this thread and in several others.

    The first failure stops all threads, which are joined before it is raised. Of several failures the one with the
    lowest number is raised. If the process cannot start more threads, fewer do the work.

    Args:
        work: Function that is called from any of the threads.
        count: Number of calls.
        threads: Most threads, that of the caller included.
        name: Prefix of the names of the threads.
    """
    waiting = deque(range(count))
    failures: dict[int, BaseException] = {}

    def run() -> None:
        while waiting:
            try:
                number = waiting.popleft()
            except IndexError:  # another thread was faster
                return
            try:
                work(number)
            except BaseException as error:  # noqa: BLE001  (raised again in the caller's thread)
                failures[number] = error
                waiting.clear()

    started: list[Worker] = []
    try:
        start_threads(started, min(threads, count) - 1, run, name)
        run()
    finally:
        waiting.clear()
        join_threads(started)
    if failures:
        raise failures[min(failures)]


class _Ends(threading.local):
    """Whether the call for which a thread works has ended."""

    ended: Callable[[], bool] | None = None


_ENDS = _Ends()


def stops_when(ended: Callable[[], bool]) -> None:
    """Let long pauses of this thread end as soon as a function returns True."""
    _ENDS.ended = ended


def stopping() -> bool:
    """Return whether the call for which this thread works has ended, so that its result is not needed."""
    return _ENDS.ended is not None and _ENDS.ended()


class Task(Generic[_Result]):
    """A function call that another thread runs."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work: Callable[[], _Result] | None = work
        self._outcome: queue.SimpleQueue[tuple[_Result] | BaseException] = queue.SimpleQueue()

    def run(self) -> None:
        """Run the task; called once, from any thread."""
        work, self._work = self._work, None
        assert work is not None
        try:
            self._outcome.put((work(),))
        except BaseException as error:  # noqa: BLE001  (raised again by ``result``)
            self._outcome.put(error)

    def result(self) -> _Result:
        """Wait until the task has ended and return its result or raise its exception; called once."""
        outcome = self._outcome.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome[0]


class Workers:
    """Threads that run tasks in the order of submission. Without threads, the caller runs them."""

    def __init__(self, count: int, name: str) -> None:
        """Create the pool without starting threads.

        Args:
            count: Number of threads; fewer are started if the process may not start more.
            name: Prefix of the names of the threads.
        """
        self._count = count
        self._name = name
        self._threads: list[Worker] = []
        self._waiting: queue.SimpleQueue[Task[object] | None] = queue.SimpleQueue()
        self._stopped = False

    def __enter__(self) -> Self:
        try:
            start_threads(self._threads, self._count, self._work, self._name)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def start(self, work: Callable[[], _Result]) -> Task[_Result]:
        """Submit ``work`` and return its task."""
        task = Task(work)
        if self._threads:
            self._waiting.put(task)  # type: ignore[arg-type]  # only the task itself stores its result
        else:
            task.run()
        return task

    def _end(self) -> None:
        """Wait for tasks that have begun; the others never run."""
        self._stopped = True
        for _ in range(self._count):  # not len(threads): an interrupt can keep a thread out of the list
            self._waiting.put(None)
        join_threads(self._threads)

    def _work(self) -> None:
        stops_when(lambda: self._stopped)
        while (task := self._waiting.get()) is not None:
            if self._stopped:
                return
            task.run()
            del task  # its result may be large, and the next task may come much later
