"""Descriptors, threads and temporary files of a process, compared before and after a test."""

from __future__ import annotations

import os
import sys
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
            # A thread without an identity was interrupted before its start; it never runs, but stays in Python's list.
            # The monitor of tqdm, which other libraries draw with, stays for the process.
            threads=frozenset(
                thread for thread in threading.enumerate() if thread.ident is not None and thread.name != "tqdm_monitor"
            ),
            temporary=frozenset(os.listdir(tempfile.gettempdir())) - _directory_of_torch(),
        )

    def left_behind(self) -> list[str]:
        """Return one line for each resource that is held now and was not held then."""
        deadline = time.monotonic() + _THREAD_GRACE
        for thread in Holdings.now().threads - self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        now = Holdings.now()
        return [
            *(f"open descriptor: {target}" for target in (now.descriptors - self.descriptors).elements()),
            *(f"running thread: {thread.name}" for thread in now.threads - self.threads),
            *(f"temporary file: {name}" for name in sorted(now.temporary - self.temporary)),
        ]


def open_files() -> Counter[str]:
    """Return the number of open descriptors of each file of this process; empty if the system does not list them."""
    targets: Counter[str] = Counter()
    for descriptor in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.exists() else ():
        try:
            target = os.readlink(_DESCRIPTORS / descriptor)
        except FileNotFoundError:
            continue  # the descriptor of the listed directory itself
        if not target.endswith(".ttf"):  # matplotlib keeps its fonts open
            targets[target] += 1
    return targets


def _directory_of_torch() -> set[str]:
    """Return the directory that torch 2.6 makes when ``torch.distributed.nn`` is imported, and removes at exit."""
    directory = getattr(sys.modules.get("torch.distributed.nn.jit.instantiator"), "_TEMP_DIR", None)
    return {os.path.basename(directory.name)} if isinstance(directory, tempfile.TemporaryDirectory) else set()
