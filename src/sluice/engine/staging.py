"""The gate: reusable host buffers. What passes through staging never takes more memory than they do.

A buffer returns to the pool with the tickets of device copies that still read from it, and the next borrower waits for
them. Buffers are lent oldest first, which makes this wait as short as possible.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

from sluice.engine.host_memory import HostMemory

__all__ = ["StagingBuffer", "StagingPool", "Ticket"]


class Ticket(Protocol):
    """A point in the work of a device, such as an event."""

    def synchronize(self) -> None:
        """Return once all copies that were started before the ticket was made have read their sources."""
        ...


class StagingBuffer:
    """A slice of memory; those of a pool are aligned to 4 KiB so that direct reads can land in them.

    Attributes:
        memory: The memory that it is a part of, for ``torch.frombuffer``.
        address: Address of its first byte.
        start: Its first byte in ``memory``.
        view: Its bytes.
        tickets: What to wait for before it is written again.
    """

    __slots__ = ("address", "memory", "start", "tickets", "view")

    def __init__(self, memory: mmap.mmap | bytearray, start: int, nbytes: int) -> None:
        self.memory = memory
        self.start = start
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory, start))
        self.view = memoryview(memory)[start : start + nbytes]
        self.tickets: list[Ticket] = []


class StagingPool:
    """Buffers of ``buffer_bytes``; each is lent to one reader at a time, which may pass it on to a copier."""

    def __init__(self, *, buffer_bytes: int, count: int, huge_pages: bool) -> None:
        self.buffer_bytes = buffer_bytes
        #: The memory of the buffers, one block for each time that the pool grew.
        self.blocks: list[HostMemory] = []
        self._count = 0
        #: Whether its memory is on huge pages.
        self.huge_pages = huge_pages
        self._free: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        self._locked = 0
        self._locks = ExitStack()
        self.grow_to(count)

    def grow_to(self, count: int) -> None:
        """Allocate what is missing to ``count`` buffers."""
        more = count - self._count
        if more <= 0:
            return
        memory = HostMemory(self.buffer_bytes * more, huge_pages=self.huge_pages)
        self.blocks.append(memory)
        self._count = count
        for number in range(more):
            start = memory.start + number * self.buffer_bytes
            self._free.put(StagingBuffer(memory.mapping, start, self.buffer_bytes))

    def page_lock(self, lock: Callable[[HostMemory], AbstractContextManager[None]]) -> None:
        """Enter ``lock`` for every block that was not locked before; ``close`` leaves them."""
        while self._locked < len(self.blocks):
            self._locks.enter_context(lock(self.blocks[self._locked]))
            self._locked += 1

    def close(self) -> None:
        """Leave all locks; no copy may be under way."""
        self._locks.close()

    def borrow(self) -> StagingBuffer:
        """Wait for a free buffer, and for the device copies that still read from it."""
        buffer = self._free.get()
        try:
            while buffer.tickets:
                buffer.tickets.pop().synchronize()
        except BaseException:
            self._free.put(buffer)
            raise
        return buffer

    def give_back(self, buffer: StagingBuffer) -> None:
        """Make a buffer available to the next borrower."""
        self._free.put(buffer)

    @contextmanager
    def lent(self) -> Iterator[StagingBuffer]:
        """Lend a buffer for the duration of the block."""
        buffer = self.borrow()
        try:
            yield buffer
        finally:
            self.give_back(buffer)
