"""Faults of the operating system, injected where sluice calls it: all tensor data is read by ``os.preadv``."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import pytest

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
    """Return the fault, or a function of the system, that raises an error of the operating system."""

    def fail(*_: object, **__: object) -> Any:
        raise OSError(number, os.strerror(number))

    return fail


def short(most: int) -> Fault:
    """Return the fault that reads ``most`` bytes at most."""

    def cut(read: Callable[[memoryview], int], buffer: memoryview, offset: int) -> int:
        return read(buffer[:most])

    return cut
