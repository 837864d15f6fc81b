"""Stop a save at its k-th system call, by replacing the functions of ``os`` that its modules call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

#: Functions that a save calls and that can fail, each with the module that holds the name.
CALLS = (
    *(("os", name) for name in ("open", "close", "scandir", "listdir", "mkdir", "rmdir", "unlink")),
    *(("os", name) for name in ("posix_fallocate", "pwrite", "ftruncate", "fchmod", "chmod", "fsync", "fstat")),
    *(("os", name) for name in ("link", "rename", "replace")),
    ("sluice.writing.durable.partial_files", "flock"),
)


class SystemCalls:
    """The system calls of one save: the ``at``-th, counted from 1, is passed to ``stop`` instead.

    Attributes:
        count: Calls so far.
        stopped: Name of the stopped call; empty if the save ended before it.
    """

    def __init__(self, at: int, stop: Callable[[Callable[[], Any], str], Any]) -> None:
        self.count = 0
        self.stopped = ""
        self._at = at
        self._stop = stop
        self._lock = threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the calls of the block."""
        with ExitStack() as stack:
            for module, name in CALLS:
                real = getattr(_module(module), name)
                stack.enter_context(mock.patch(f"{module}.{name}", self._counted(real, name)))
            yield

    def _counted(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with self._lock:  # large files are written by several threads
                self.count += 1
                stopped = self.count == self._at
            if not stopped:
                return real(*args, **options)
            self.stopped = name
            return self._stop(lambda: real(*args, **options), name)

        return call


def failing(number: int) -> Callable[[Callable[[], Any], str], Any]:
    """Return a function that raises an error of the operating system; descriptors to be closed are closed first."""

    def fail(real: Callable[[], Any], name: str) -> Any:
        if name == "close":
            real()
        raise OSError(number, os.strerror(number))

    return fail


def _module(name: str) -> Any:
    return __import__(name, fromlist=["_"])
