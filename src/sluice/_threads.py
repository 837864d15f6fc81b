"""Threads that end with the call that started them."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Generic, Self, TypeVar

import psutil

from sluice import _options as options

try:
    import resource
except ImportError:  # Windows has no such limits
    resource = None  # type: ignore[assignment]  # the one name for both

__all__ = ["Job", "Worker", "Workers", "address_space_room", "join_threads", "spare_threads", "start_threads"]

_Result = TypeVar("_Result")


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


def address_space_room() -> int | None:
    """Return the virtual memory that the process may still map, in bytes (RLIMIT_AS); None without a limit."""
    if resource is None:
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - psutil.Process().memory_info().vms)


def spare_threads(count: int) -> int:
    """Return how many of ``count`` threads may run that no plan counts: none under a limit on virtual memory.

    A thread's stack and malloc arena stay reserved after its end. The weights, which are planned for later, would lack
    them, and how many arenas there are depends on how many threads happened to run at once: of two equal loads one
    would fit and the other would not.
    """
    return count if address_space_room() is None else 0


def start_threads(threads: list[Worker], count: int, work: Callable[[], None], name: str) -> None:
    """Start ``count`` threads and add them to ``threads``; fewer where the process may start no more of them.

    Args:
        threads: Gets each thread before it starts, because an interrupt can come as soon as it runs.
        count: How many.
        work: What each does; it must not raise.
        name: Their names begin with it.
    """
    for number in range(count):
        # A thread that finds no memory for its own first steps ends before it says that it runs, and Python waits for
        # that word for ever.
        room = address_space_room()
        if room is not None and room < options.THREAD_ADDRESS_BYTES:
            return
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


class Job(Generic[_Result]):
    """Work that was handed to other threads."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        self._work: Callable[[], _Result] | None = work
        self._outcome: queue.SimpleQueue[tuple[_Result] | BaseException] = queue.SimpleQueue()

    def run(self) -> None:
        """Do it; called once, by any thread."""
        work, self._work = self._work, None
        assert work is not None
        try:
            self._outcome.put((work(),))
        except BaseException as error:  # noqa: BLE001  (raised again by whoever asks for the result)
            self._outcome.put(error)

    def result(self) -> _Result:
        """Wait for its end, and return what it returned or raise what it raised; once."""
        outcome = self._outcome.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome[0]


class Workers:
    """Threads that do jobs, in the order in which they come. Without any, the caller's own thread does them."""

    def __init__(self, count: int, name: str) -> None:
        """Start nothing yet.

        Args:
            count: How many threads; fewer where the process may start no more of them.
            name: Their names begin with it.
        """
        self._count = count
        self._name = name
        self._threads: list[Worker] = []
        self._waiting: queue.SimpleQueue[Job[object] | None] = queue.SimpleQueue()
        self._stopped = False

    def __enter__(self) -> Self:
        try:
            start_threads(self._threads, self._count, self._work, self._name)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def start(self, work: Callable[[], _Result]) -> Job[_Result]:
        """Hand over some work."""
        job = Job(work)
        if self._threads:
            self._waiting.put(job)  # type: ignore[arg-type]  # nobody puts anything into a job but itself
        else:
            job.run()
        return job

    def _end(self) -> None:
        """Wait for what has begun; what has not is never done."""
        self._stopped = True
        for _ in range(self._count):  # also for one that an interrupt kept out of the list
            self._waiting.put(None)
        join_threads(self._threads)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            if self._stopped:
                return
            job.run()
            del job  # its result may be large, and the next job long in coming
