"""Tensors as bytes in pieces: in row-major order, in the dtype of the file, through the buffers of one pool."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sluice import _options as options
from sluice._dtypes import torch_dtype
from sluice._geometry import round_up
from sluice.engine.host_copies import copy_in_thread
from sluice.engine.staging import StagingBuffer, StagingPool
from sluice.writing.durable.direct import block_bytes

__all__ = ["Chunk", "Staging", "chunks", "row_major_bytes"]


@dataclass(frozen=True, slots=True)
class Staging:
    """The buffers through which everything goes that is not in host memory as the file wants it."""

    #: One for each writer; a block longer than a piece, so that a piece can begin anywhere in a block.
    pool: StagingPool
    #: Bytes of the longest piece.
    piece_bytes: int

    @classmethod
    def make(cls, nbytes: int) -> Staging:
        """Return buffers of about ``nbytes`` bytes together; only what is used becomes resident."""
        piece = max(1, nbytes // options.WRITERS)
        buffer = round_up(piece, block_bytes()) + block_bytes()
        return cls(StagingPool(buffer_bytes=buffer, count=options.WRITERS, huge_pages=True), piece)

    @contextmanager
    def lent(self) -> Iterator[StagingBuffer]:
        """Lend a buffer for the length of the block."""
        buffer = self.pool.borrow()
        try:
            yield buffer
        finally:
            self.pool.give_back(buffer)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor whose elements follow each other in the file."""

    #: Its bytes there.
    nbytes: int
    #: Its bytes, where they are in host memory as the file wants them; the tensor must outlive them.
    in_place: memoryview | None
    #: The elements, where they are not.
    elements: torch.Tensor
    #: Dtype in the file.
    dtype: torch.dtype

    def put_into(self, buffer: StagingBuffer, offset: int = 0) -> memoryview:
        """Make the bytes in a buffer and return them; from any thread.

        Args:
            buffer: From the staging that the chunk was cut for.
            offset: Where they will lie in the file: direct writes want the same place in a block.
        """
        first = offset % block_bytes()
        made = torch.frombuffer(
            buffer.memory.mapping, dtype=torch.uint8, count=self.nbytes, offset=buffer.start + first
        )
        with torch.inference_mode(mode=False), torch.no_grad():
            # Formats align tensors to their elements, and so every part of them.
            copy_in_thread(made.view(self.dtype).view(self.elements.shape), self.elements)
        return buffer.view[first : first + self.nbytes]


def chunks(tensor: torch.Tensor, dtype: str, staging: Staging) -> Iterator[Chunk]:
    """Yield a strided tensor in parts, in row-major order. The bytes of a conjugated or negated view are its values'.

    Args:
        tensor: On any device; it must outlive the chunks.
        dtype: The dtype of the bytes.
        staging: What the parts have to fit.
    """
    tensor = tensor.detach()
    finished = torch_dtype(dtype)
    if tensor.numel() == 0:
        return
    lazy = tensor.is_conj() or tensor.is_neg()
    if tensor.device.type == "cpu" and tensor.dtype == finished and tensor.is_contiguous() and not lazy:
        whole = _bytes(tensor)
        for start in range(0, len(whole), options.WRITE_BYTES):
            piece = whole[start : start + options.WRITE_BYTES]
            yield Chunk(len(piece), piece, tensor, finished)
        return
    for elements in _pieces(tensor, max(1, staging.piece_bytes // finished.itemsize)):
        yield Chunk(elements.numel() * finished.itemsize, None, elements, finished)


def row_major_bytes(tensor: torch.Tensor, dtype: str, staging: Staging) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order; each piece is valid until the next one is asked for."""
    for chunk in chunks(tensor, dtype, staging):
        if chunk.in_place is not None:
            yield chunk.in_place
            continue
        with staging.lent() as buffer:
            yield chunk.put_into(buffer)


def _pieces(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into parts of at most ``limit`` elements whose row-major elements follow each other."""
    if tensor.numel() <= limit:
        yield tensor
        return
    rows = limit // (tensor.numel() // tensor.shape[0])
    if rows:
        yield from torch.split(tensor, rows)
        return
    for row in tensor:
        yield from _pieces(row, limit)


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor; whoever holds it must hold the tensor too."""
    nbytes = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
