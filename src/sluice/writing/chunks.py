"""Convert tensors to bytes in chunks: row-major, in the dtype of the file, through one pool of buffers."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from msgspec import Struct

from sluice import _defaults as defaults
from sluice._dtypes import torch_dtype
from sluice.engine.host_copies import copy_in_thread
from sluice.engine.staging import StagingBuffer, StagingPool
from sluice.entries.slicing import boxes
from sluice.records.geometry import round_up
from sluice.writing.durable.direct import block_bytes

__all__ = ["Chunk", "Staging", "chunks"]


class Staging(Struct, frozen=True):
    """Buffers for tensors that are cast, copied from an accelerator or made contiguous on the way to the file."""

    #: One buffer per writer; one block longer than a piece, so that a piece can begin anywhere in a block.
    pool: StagingPool
    #: Size of the longest piece, in bytes.
    piece_bytes: int

    @classmethod
    def make(cls, nbytes: int) -> Staging:
        """Return buffers of about ``nbytes`` bytes in total; only used pages become resident."""
        piece = max(1, nbytes // defaults.WRITERS)
        buffer = round_up(piece, block_bytes()) + block_bytes()
        return cls(StagingPool(buffer_bytes=buffer, count=defaults.WRITERS, huge_pages=True), piece)

    @contextmanager
    def lent(self) -> Iterator[StagingBuffer]:
        """Lend a buffer for the duration of the block."""
        buffer = self.pool.borrow()
        try:
            yield buffer
        finally:
            self.pool.give_back(buffer)


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
