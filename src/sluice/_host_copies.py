"""Copies from staging to host memory, in pieces that keep torch in the calling thread and take no memory of note.

Bytes may lie at any address: a file of others, or an item of a distributed checkpoint, starts where it likes. Elements
at an address that their dtype cannot have are moved to one that it can, a piece at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from sluice import _options as options
from sluice._geometry import Piece, collapse, cut
from sluice._records import MathBit

__all__ = ["Source", "copy_in_pieces", "multiplied"]


@dataclass(frozen=True, slots=True)
class Source:
    """A strided view of bytes on the host."""

    #: The bytes from the first to the last element: one dimension of uint8, at any address.
    raw: torch.Tensor
    #: Dtype of the elements.
    dtype: torch.dtype
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension, in elements.
    stride: tuple[int, ...]
    #: What the elements are multiplied by on their way, one number after the other.
    factors: tuple[float, ...] = ()
    #: Whether the conjugate, the negative or both of the elements is wanted.
    math_bits: tuple[MathBit, ...] = ()

    @property
    def aligned(self) -> bool:
        """Whether its bytes lie at an address that the dtype can have."""
        return self.raw.data_ptr() % self.dtype.itemsize == 0

    def on_host(self) -> torch.Tensor:
        """Return the view itself, not multiplied; all of its bytes are moved where they are not aligned."""
        return self.seen_in(self.raw if self.aligned else self.raw.clone())

    def seen_in(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the view of a copy of the bytes."""
        seen = raw.view(self.dtype).as_strided(self.shape, self.stride, raw.storage_offset() // self.dtype.itemsize)
        if "conj" in self.math_bits:
            seen = seen.conj()
        if "neg" in self.math_bits:
            seen = torch._neg_view(seen)  # noqa: SLF001 - there is no public name, and neg() would make a copy
        return seen


def multiplied(tensor: torch.Tensor, factors: Iterable[float]) -> torch.Tensor:
    """Return ``tensor * factor * ...`` in the tensor's dtype, and the tensor itself without factors."""
    for factor in factors:
        tensor = tensor * factor
    return tensor


def copy_in_pieces(target: torch.Tensor, source: Source) -> None:
    """Copy on the host, in pieces small enough that torch stays in this thread: the readers use every core."""
    if source.aligned or not target.numel():
        _copy_aligned(target, source)
        return
    for part, moved in _moved(target, source):
        _copy_aligned(part, moved)


def _moved(target: torch.Tensor, source: Source) -> Iterator[tuple[torch.Tensor, Source]]:
    """Yield the parts of a copy, the bytes of each in one scratch that holds those of one part."""
    shape, step, target_step = collapse(source.shape, source.stride, target.stride())
    nbytes = source.raw.numel()
    whole = Piece(0, nbytes, shape, step, target_step, int(target.storage_offset()))
    scratch = torch.empty(min(nbytes, options.MOVED_BYTES), dtype=torch.uint8)
    for piece in cut(whole, source.dtype.itemsize, limit_bytes=options.MOVED_BYTES, gap_bytes=options.MOVED_BYTES):
        # Not copy_: torch would start a pool of threads for so many bytes.
        ctypes.memmove(scratch.data_ptr(), source.raw.data_ptr() + piece.start_byte, piece.nbytes)
        part = target.as_strided(piece.shape, piece.target_stride, piece.target_start)
        yield part, replace(source, raw=scratch[: piece.nbytes], shape=piece.shape, stride=piece.source_stride)


def _copy_aligned(target: torch.Tensor, source: Source) -> None:
    view = source.on_host()
    if target.numel() <= options.CAST_PIECE_ELEMENTS:
        target.copy_(multiplied(view, source.factors))
        return
    rows = max(1, options.CAST_PIECE_ELEMENTS // (target.numel() // target.shape[0]))
    pieces = torch.split(target, rows), torch.split(view, rows)
    if not source.factors:
        # One call for all pieces: the interpreter lock is released for the whole of it.
        torch._foreach_copy_(*pieces)
        return
    for into, piece in zip(*pieces, strict=True):
        into.copy_(multiplied(piece, source.factors))
