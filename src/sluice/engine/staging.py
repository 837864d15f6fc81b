"""The gate: a fixed pool of reusable host buffers. What passes through staging never takes more than this.

A buffer goes back to the pool with the tickets of the copies that still read from it, and whoever borrows it next waits
for them. Buffers are lent oldest first, so that this wait is the shortest there is.
"""

from __future__ import annotations

import queue
from typing import Protocol

from sluice.engine.host_memory import HostMemory

__all__ = ["StagingBuffer", "StagingPool", "Ticket"]


class Ticket(Protocol):
    """A moment in the work of a device."""

    def wait(self) -> None:
        """Return once all copies that were started before the ticket was made have read their sources."""
        ...


class StagingBuffer:
    """A slice of the pool's memory, aligned to 4 KiB so that direct reads can land in it.

    Attributes:
        memory: The memory that it is a part of, for ``torch.frombuffer``.
        start: First byte in ``memory.mapping``.
        view: Its bytes.
        tickets: What has to be waited for before it is written again.
    """

    __slots__ = ("memory", "start", "tickets", "view")

    def __init__(self, memory: HostMemory, offset: int, nbytes: int) -> None:
        self.memory = memory
        self.start = memory.start + offset
        self.view = memory.view()[offset : offset + nbytes]
        self.tickets: list[Ticket] = []


class StagingPool:
    """``count`` buffers of ``buffer_bytes``, lent to one reader at a time each, which may pass them on to a copier."""

    def __init__(self, *, buffer_bytes: int, count: int, huge_pages: bool) -> None:
        self._free: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        #: All of its memory; None when there are no buffers.
        self.memory = HostMemory(buffer_bytes * count, huge_pages=huge_pages) if count else None
        if self.memory is not None:
            for number in range(count):
                self._free.put(StagingBuffer(self.memory, number * buffer_bytes, buffer_bytes))

    def borrow(self) -> StagingBuffer:
        """Wait for a free buffer, and for the copies that still read from it."""
        buffer = self._free.get()
        try:
            while buffer.tickets:
                buffer.tickets.pop().wait()
        except BaseException:
            self._free.put(buffer)
            raise
        return buffer

    def give_back(self, buffer: StagingBuffer) -> None:
        """Let the next one borrow a buffer."""
        self._free.put(buffer)
