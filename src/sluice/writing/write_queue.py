"""Tensors as bytes, in chunks of one pool of buffers, and a bounded queue of them that several threads write to a file.

The bytes are row-major, in the dtype of the file.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from msgspec import Struct

from sluice import _defaults as defaults
from sluice._dtypes import torch_dtype
from sluice._threads import Task, Workers
from sluice.engine.host_copies import copy_in_thread
from sluice.engine.staging import StagingBuffer, StagingPool
from sluice.entries.slicing import boxes
from sluice.records.geometry import round_up
from sluice.writing.durable.direct import block_bytes

__all__ = ["Put", "Staging", "WriteQueue", "chunks", "write_queue"]

#: Writes bytes of a stored item: ``(first byte in the item, bytes)``.
Put = Callable[[int, memoryview], None]

#: Receives all bytes of a stored item, in order.
Consumer = Callable[[memoryview], None]


class Staging(Struct, frozen=True):
    """Buffers for tensors that are cast, copied from an accelerator or made contiguous on the way to the file."""

    #: One buffer per piece that is being written; one block longer than a piece, so that it can begin anywhere in a
    #: block.
    pool: StagingPool
    #: Size of the longest piece, in bytes.
    piece_bytes: int

    @classmethod
    def make(cls, nbytes: int) -> Staging:
        """Return buffers of about ``nbytes`` bytes in total; only used pages become resident."""
        piece = max(1, nbytes // defaults.SAVE_BUFFERS)
        buffer = round_up(piece, block_bytes()) + block_bytes()
        return cls(StagingPool(buffer_bytes=buffer, count=defaults.SAVE_BUFFERS, huge_pages=True), piece)


class Chunk(Struct, frozen=True):
    """Consecutive row-major elements of a tensor."""

    #: Size in the file, in bytes.
    nbytes: int
    #: The bytes, if host memory holds them in the form of the file; the tensor must outlive them. Otherwise None.
    in_place: memoryview | None
    #: The elements; read only if ``in_place`` is None.
    elements: torch.Tensor
    #: Dtype in the file.
    dtype: torch.dtype

    def put_into(self, buffer: StagingBuffer, offset: int = 0) -> memoryview:
        """Convert the elements in a buffer and return the bytes. Thread-safe.

        Args:
            buffer: A buffer of the staging that was passed to ``chunks``.
            offset: Position in the file, in bytes: direct writes need the same position within a block.
        """
        first = offset % block_bytes()
        converted = torch.frombuffer(buffer.memory, dtype=torch.uint8, count=self.nbytes, offset=buffer.start + first)
        with torch.inference_mode(mode=False), torch.no_grad():
            # Formats align tensors to their elements, and so every chunk.
            copy_in_thread(converted.view(self.dtype).view(self.elements.shape), self.elements)
        return buffer.view[first : first + self.nbytes]


def chunks(tensor: torch.Tensor, dtype: str, staging: Staging) -> Iterator[Chunk]:
    """Yield a strided tensor in chunks, in row-major order; conjugate and negative views are resolved.

    Args:
        tensor: A tensor on any device; it must outlive the chunks.
        dtype: The dtype of the bytes.
        staging: Buffers that each chunk must fit.
    """
    tensor = tensor.detach()
    finished = torch_dtype(dtype)
    if tensor.numel() == 0:
        return
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.device.type == "cpu" and tensor.dtype == finished and tensor.is_contiguous() and not lazy:
        whole = _bytes(tensor)
        for start in range(0, len(whole), defaults.WRITE_BYTES):
            piece = whole[start : start + defaults.WRITE_BYTES]
            yield Chunk(len(piece), piece, tensor, finished)
        return
    for box in boxes(tuple(tensor.shape), max(1, staging.piece_bytes // finished.itemsize)):
        elements = tensor[box]
        yield Chunk(elements.numel() * finished.itemsize, None, elements, finished)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor; the tensor must outlive it."""
    nbytes = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")


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

    def write(
        self, tensor: torch.Tensor, dtype: str, first: int, put: Put, consumer: Consumer | None = None, at: int = 0
    ) -> None:
        """Write the elements of a tensor in row-major order.

        Args:
            tensor: The tensor; it must outlive the block.
            dtype: The dtype in the file.
            first: Position of the stored item in the file, in bytes.
            put: Called from any thread, once for each byte.
            consumer: Called in this thread with every byte, in order.
            at: Position of the first element in the item, in bytes.
        """
        for chunk in chunks(tensor, dtype, self._staging):
            while len(self._under_way) >= 2 * defaults.WRITERS:
                self._wait()
            work = partial(self._make_and_put, chunk, first + at, partial(put, at), consumer)
            if consumer is None or chunk.in_place is not None:
                if consumer is not None and chunk.in_place is not None:
                    consumer(chunk.in_place)
                self._under_way.append((chunk.nbytes, self._workers.start(work)))
            else:
                # In this thread: a converted chunk that waits for its turn would hold a buffer that earlier ones need.
                work()
                self._wrote(chunk.nbytes)
            at += chunk.nbytes

    def drain(self) -> None:
        """Wait for all writes."""
        while self._under_way:
            self._wait()

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
        with self._staging.pool.lent() as buffer:
            converted = chunk.put_into(buffer, offset)
            if consumer is not None:
                consumer(converted)
            put(converted)
