"""The gate: a fixed pool of reusable host buffers. What passes through staging never takes more than this."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from sluice._hostmemory import HostMemory

__all__ = ["StagingBuffer", "StagingPool"]


class StagingBuffer:
    """A slice of the pool's memory, aligned to 4 KiB so that direct reads can land in it.

    Attributes:
        memory: The memory that it is a part of, for ``torch.frombuffer``.
        start: First byte in ``memory.mapping``.
        view: Its bytes.
    """

    __slots__ = ("memory", "start", "view")

    def __init__(self, memory: HostMemory, offset: int, nbytes: int) -> None:
        self.memory = memory
        self.start = memory.start + offset
        self.view = memory.view()[offset : offset + nbytes]


class StagingPool:
    """``count`` buffers of ``buffer_bytes``, lent to one reader at a time each."""

    def __init__(self, *, buffer_bytes: int, count: int, huge_pages: bool) -> None:
        self._free: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        if count:
            memory = HostMemory(buffer_bytes * count, huge_pages=huge_pages)
            for number in range(count):
                self._free.put(StagingBuffer(memory, number * buffer_bytes, buffer_bytes))

    @contextmanager
    def lend(self) -> Iterator[StagingBuffer]:
        """Wait for a free buffer and lend it for the length of the block."""
        buffer = self._free.get()
        try:
            yield buffer
        finally:
            self._free.put(buffer)
