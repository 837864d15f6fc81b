"""Tensors as bytes in pieces: in row-major order, in the dtype of the file, through one buffer."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sluice._dtypes import torch_dtype
from sluice._hostmemory import HostMemory

__all__ = ["Staging", "chunks"]


@dataclass(frozen=True, slots=True)
class Staging:
    """The buffer through which everything goes that is not in host memory as the file wants it."""

    memory: HostMemory

    @classmethod
    def make(cls, nbytes: int) -> Staging:
        """Return a buffer of ``nbytes`` bytes; only what is used becomes resident."""
        return cls(HostMemory(nbytes, huge_pages=True))

    def view(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the first ``count`` elements of it."""
        return torch.frombuffer(self.memory.mapping, dtype=dtype, count=count, offset=self.memory.start)


def chunks(tensor: torch.Tensor, dtype: str, staging: Staging) -> Iterator[memoryview]:
    """Yield the bytes of a strided tensor in row-major order.

    A piece is valid until the next one is asked for. A dense host tensor that is not cast is not copied. The bytes of a
    conjugated or negated view are those of its values.

    Args:
        tensor: On any device.
        dtype: The dtype of the bytes.
        staging: Of at least one element.
    """
    tensor = tensor.detach()
    lazy = tensor.is_conj() or tensor.is_neg()
    finished = torch_dtype(dtype)
    if tensor.numel() == 0:
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        limit = max(1, staging.memory.nbytes // finished.itemsize)
        if tensor.device.type == "cpu" and tensor.dtype == finished and tensor.is_contiguous() and not lazy:
            yield from _in_place(tensor, staging.memory.nbytes)
            return
        for piece in _pieces(tensor, limit):
            out = staging.view(piece.numel(), finished)
            out.view(piece.shape).copy_(piece)
            yield _bytes(out)


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


def _in_place(tensor: torch.Tensor, limit_bytes: int) -> Iterator[memoryview]:
    whole = _bytes(tensor)
    for start in range(0, len(whole), limit_bytes):
        yield whole[start : start + limit_bytes]


def _bytes(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor; whoever holds it must hold the tensor too."""
    nbytes = tensor.numel() * tensor.itemsize
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B")
