"""Pieces of tensors on their way to a file: several threads make them, compute their CRCs and write them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from sluice import _options as options
from sluice._threads import Job, Workers
from sluice.writing.chunks import Chunk, Staging, chunks

__all__ = ["WriteQueue", "write_queue"]

#: Writes some bytes of what is stored, from a position in it on.
Put = Callable[[int, memoryview], None]

#: Looks at some bytes of what is stored; called in order.
Look = Callable[[memoryview], None]


@contextmanager
def write_queue(nbytes: int, staging: Staging, wrote: Callable[[int], None]) -> Iterator[WriteQueue]:
    """Lend the threads that write one file; all writes have ended when the block has, however it ends.

    Args:
        nbytes: Bytes of the file: small ones are written by the caller's thread.
        staging: For what is not in host memory as the file wants it.
        wrote: Called in the caller's thread with the bytes of each piece that was written.

    Raises:
        SaveError: A write failed.
    """
    count = options.WRITERS if nbytes >= options.DIRECT_FILE_BYTES else 0
    with Workers(count, "sluice-writer") as workers:
        queue = WriteQueue(workers, staging, wrote)
        yield queue
        queue.drain()


class WriteQueue:
    """Writes that are under way; see ``write_queue``."""

    def __init__(self, workers: Workers, staging: Staging, wrote: Callable[[int], None]) -> None:
        self._workers = workers
        self._staging = staging
        self._wrote = wrote
        self._under_way: deque[tuple[int, Job[None]]] = deque()

    def write(self, tensor: torch.Tensor, dtype: str, first: int, put: Put, look: Look | None = None) -> None:
        """Write the elements of a tensor in row-major order.

        Args:
            tensor: It must outlive the block.
            dtype: The dtype in the file.
            first: Position in the file of its first element, in bytes.
            put: Called from any thread, for each byte once.
            look: Called in this thread with every byte, in order.
        """
        at = 0
        for chunk in chunks(tensor, dtype, self._staging):
            while len(self._under_way) >= 2 * options.WRITERS:
                self._wait()
            work = partial(self._make_and_put, chunk, first + at, partial(put, at), look)
            if look is None:
                self._start(chunk.nbytes, work)
            elif chunk.in_place is not None:
                look(chunk.in_place)
                self._start(chunk.nbytes, partial(put, at, chunk.in_place))
            else:
                # In this thread: waiting for its turn, what is made would hold a buffer that those under way may need.
                work()
                self._wrote(chunk.nbytes)
            at += chunk.nbytes

    def drain(self) -> None:
        """Wait for what is under way."""
        while self._under_way:
            self._wait()

    def _start(self, nbytes: int, work: Callable[[], None]) -> None:
        self._under_way.append((nbytes, self._workers.start(work)))

    def _wait(self) -> None:
        nbytes, job = self._under_way.popleft()
        job.result()
        self._wrote(nbytes)

    def _make_and_put(self, chunk: Chunk, offset: int, put: Callable[[memoryview], None], look: Look | None) -> None:
        if chunk.in_place is not None:
            put(chunk.in_place)
            return
        with self._staging.lent() as buffer:
            made = chunk.put_into(buffer, offset)
            if look is not None:
                look(made)
            put(made)
