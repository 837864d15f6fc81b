"""A bounded queue of chunks of tensors that several threads convert, checksum and write to a file."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from sluice import _defaults as defaults
from sluice._threads import Task, Workers
from sluice.writing.chunks import Chunk, Staging, chunks

__all__ = ["Put", "WriteQueue", "write_queue"]

#: Writes bytes of a stored item: ``(first byte in the item, bytes)``.
Put = Callable[[int, memoryview], None]

#: Receives all bytes of a stored item, in order.
Consumer = Callable[[memoryview], None]


@contextmanager
def write_queue(nbytes: int, staging: Staging, wrote: Callable[[int], None]) -> Iterator[WriteQueue]:
    """Lend a queue of writes to one file; no write outlives the block.

    Args:
        nbytes: Size of the file, in bytes: the caller's thread writes small files.
        staging: Buffers for chunks that are not in host memory in the form of the file.
        wrote: Called in the caller's thread with the size of each written chunk, in bytes.

    Raises:
        SaveError: A write failed.
    """
    count = defaults.WRITERS if nbytes >= defaults.DIRECT_FILE_BYTES else 0
    with Workers(count, "sluice-writer") as workers:
        queue = WriteQueue(workers, staging, wrote)
        yield queue
        queue.drain()


class WriteQueue:
    """Writes in progress; see ``write_queue``."""

    def __init__(self, workers: Workers, staging: Staging, wrote: Callable[[int], None]) -> None:
        self._workers = workers
        self._staging = staging
        self._wrote = wrote
        self._under_way: deque[tuple[int, Task[None]]] = deque()

    def write(self, tensor: torch.Tensor, dtype: str, first: int, put: Put, consumer: Consumer | None = None) -> None:
        """Write the elements of a tensor in row-major order.

        Args:
            tensor: The tensor; it must outlive the block.
            dtype: The dtype in the file.
            first: Position of its first element in the file, in bytes.
            put: Called from any thread, once for each byte.
            consumer: Called in this thread with every byte, in order.
        """
        at = 0
        for chunk in chunks(tensor, dtype, self._staging):
            while len(self._under_way) >= 2 * defaults.WRITERS:
                self._wait()
            work = partial(self._make_and_put, chunk, first + at, partial(put, at), consumer)
            if consumer is None or chunk.in_place is not None:
                if consumer is not None and chunk.in_place is not None:
                    consumer(chunk.in_place)
                self._start(chunk.nbytes, work)
            else:
                # In this thread: a converted chunk that waits for its turn would hold a buffer that earlier ones need.
                work()
                self._wrote(chunk.nbytes)
            at += chunk.nbytes

    def drain(self) -> None:
        """Wait for all writes."""
        while self._under_way:
            self._wait()

    def _start(self, nbytes: int, work: Callable[[], None]) -> None:
        self._under_way.append((nbytes, self._workers.start(work)))

    def _wait(self) -> None:
        nbytes, job = self._under_way.popleft()
        job.result()
        self._wrote(nbytes)

    def _make_and_put(
        self, chunk: Chunk, offset: int, put: Callable[[memoryview], None], consumer: Consumer | None
    ) -> None:
        if chunk.in_place is not None:
            put(chunk.in_place)
            return
        with self._staging.lent() as buffer:
            converted = chunk.put_into(buffer, offset)
            if consumer is not None:
                consumer(converted)
            put(converted)
