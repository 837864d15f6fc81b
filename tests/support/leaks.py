"""Descriptors, threads and temporary files of a process, compared before and after a test."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")

#: A thread that was told to stop gets this long to do so, in seconds: longer than a starved one needs.
_THREAD_GRACE = 60.0


@dataclass(frozen=True)
class Holdings:
    """Resources that a test must release."""

    descriptors: Counter[str]
    threads: frozenset[threading.Thread]
    temporary: frozenset[str]

    @classmethod
    def now(cls) -> Holdings:
        return cls(
            descriptors=open_files(),
            # One without an identity was interrupted before it was made; it will never run, but stays in Python's list.
            threads=frozenset(thread for thread in threading.enumerate() if thread.ident is not None),
            temporary=frozenset(os.listdir(tempfile.gettempdir())),
        )

    def left_behind(self) -> list[str]:
        """Return one line for each resource that is held now and was not held then."""
        _wait_for_threads(self.threads)
        now = Holdings.now()
        return [
            *(f"open descriptor: {target}" for target in (now.descriptors - self.descriptors).elements()),
            *(f"running thread: {thread.name}" for thread in now.threads - self.threads),
            *(f"temporary file: {name}" for name in sorted(now.temporary - self.temporary)),
        ]


def open_files() -> Counter[str]:
    """Return how often each file is open in this process; empty where the system does not tell."""
    targets: Counter[str] = Counter()
    for descriptor in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.exists() else ():
        try:
            target = os.readlink(_DESCRIPTORS / descriptor)
        except FileNotFoundError:
            continue  # the descriptor by which the directory itself was listed
        if not target.endswith(".ttf"):  # matplotlib keeps the fonts open that it has drawn with
            targets[target] += 1
    return targets


def _wait_for_threads(known: frozenset[threading.Thread]) -> None:
    deadline = time.monotonic() + _THREAD_GRACE
    for thread in Holdings.now().threads - known:
        thread.join(max(0.0, deadline - time.monotonic()))
