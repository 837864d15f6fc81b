"""Faults of the operating system where sluice calls it: reads that fail, and saves that stop at their k-th call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import pytest

import sluice
from sluice import _defaults as defaults
from sluice.writing.durable import direct as _direct

#: Functions that a save calls and that can fail, each with the module that holds the name.
CALLS = (
    *(("os", name) for name in ("open", "close", "scandir", "listdir", "mkdir", "rmdir", "unlink")),
    *(("os", name) for name in ("pwrite", "ftruncate", "fchmod", "chmod", "fsync", "fstat")),
    *(("os", name) for name in ("link", "rename", "replace")),
    ("sluice.writing.durable.replacement", "fallocate"),
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
                real = getattr(import_module(module), name)
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


#: Numbers of the saves that were read, by the name of the checkpoint and the digest of each file.
_known: dict[tuple[str, frozenset[tuple[str, bytes]]], int] = {}


def generation(path: Path, names: Iterable[str]) -> int | None:
    """Return the number that is every element of the whole checkpoint; None if there is none, or only some shards.

    The same contents are read once, unless reading fails: loops over faults see them many times.

    Args:
        path: The checkpoint; a link to a checkpoint is followed.
        names: Its tensors. A file of safetensors lacks the one that is tied to another.
    """
    if not path.exists() or (path.is_dir() and not any(not name.startswith(".") for name in os.listdir(path))):
        return None
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    contents = frozenset((str(each.relative_to(path)), blake2b(each.read_bytes()).digest()) for each in files)
    if (path.name, contents) not in _known:
        try:
            loaded = sluice.load_state_dict(path)
        except sluice.IncompleteCheckpointError:  # some shards are renamed, but the index is not
            return None
        assert set(names) - {"tied"} <= set(loaded) <= set(names)
        numbers = {int(value) for tensor in loaded.values() for value in tensor.unique().tolist()}
        assert len(numbers) == 1, f"a mix of saves: {sorted(numbers)}"
        _known[path.name, contents] = numbers.pop()
    return _known[path.name, contents]


def force_direct_writes(patch: pytest.MonkeyPatch) -> None:
    """Let every save use direct I/O."""
    patch.setattr(defaults, "DIRECT_FILE_BYTES", 1)
    patch.setattr(defaults, "DIRECT_WRITE_BYTES", 4096)
    patch.setattr(_direct, "takes_direct_io", lambda _: True)


#: Replaces a read. Arguments: the real read with all arguments bound, the buffer and the offset.
Fault: TypeAlias = Callable[[Callable[[memoryview], int], memoryview, int], int]


class Injection:
    """Replaces ``os.preadv``: the ``at``-th read gets the fault, counted from 1 over all threads; 0 faults them all.

    Attributes:
        hits: Number of reads that got the fault; a test with zero hits has tested nothing.
    """

    def __init__(self, patch: pytest.MonkeyPatch, fault: Fault, at: int = 0) -> None:
        self._real = os.preadv
        self._fault = fault
        self._at = at
        self._count = 0
        self.hits = 0
        patch.setattr(os, "preadv", self._preadv)

    def _preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int, flags: int = 0) -> int:
        def read(buffer: memoryview) -> int:
            return self._real(descriptor, [buffer], offset, flags)

        self._count += 1  # not exact with threads, but close enough to reach every read
        if self._at not in {0, self._count}:
            return read(buffers[0])
        self.hits += 1
        return self._fault(read, buffers[0], offset)


def failing(number: int) -> Callable[..., Any]:
    """Return the fault, or a function of the system, that raises its error; what is to be closed is closed first."""

    def fail(*arguments: Any, **_: object) -> Any:
        if arguments[1:] == ("close",):
            arguments[0]()
        raise OSError(number, os.strerror(number))

    return fail


def short(most: int) -> Fault:
    """Return the fault that reads ``most`` bytes at most."""

    def cut(read: Callable[[memoryview], int], buffer: memoryview, offset: int) -> int:
        return read(buffer[:most])

    return cut
