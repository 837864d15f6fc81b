"""Copies from staging to host memory, in pieces that keep torch in the calling thread and take no memory of note.

Bytes may lie at any address: a file of others, or an item of a distributed checkpoint, starts where it likes. Elements
at an address that their dtype cannot have are moved to one that it can, a piece at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from sluice import _options as options
from sluice._geometry import Piece, collapse, cut
from sluice.records import MathBit

__all__ = ["Source", "copy_in_pieces", "copy_in_thread", "multiplied"]


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


def copy_in_thread(target: torch.Tensor, source: torch.Tensor, factors: Sequence[float] = ()) -> None:
    """Copy and cast in pieces that torch does not spread over its own threads; a source on a device as a whole.

    Where the one tensor is transposed against the other, the pieces are tiles: each line of the cache that one of them
    brings is used up before it has to go.
    """
    if target.numel() <= options.CAST_PIECE_ELEMENTS or source.device != target.device:
        target.copy_(multiplied(source, factors))
        return
    tile = _tile(target, source)
    pieces = _cut(target, tile), _cut(source, tile)
    if not factors:
        # One call for all pieces: the interpreter lock is released for the whole of it.
        torch._foreach_copy_(*pieces)
        return
    for into, piece in zip(*pieces, strict=True):
        into.copy_(multiplied(piece, factors))


def _tile(target: torch.Tensor, source: torch.Tensor) -> dict[int, int]:
    """Return the sizes of one piece, long in the dimensions in which elements lie next to each other on either side.

    Returns:
        Elements by dimension, the outermost of the target first.
    """
    shape = target.shape
    order = sorted(range(len(shape)), key=target.stride, reverse=True)
    sizes = dict.fromkeys(order, 1)
    longer = [dim for dim in order if shape[dim] > 1]
    seen = [dim for dim in longer if source.stride(dim)]  # a step of 0 needs no memory
    near = min(seen, key=source.stride, default=longer[-1])
    if near != longer[-1]:
        sizes[near] = min(shape[near], options.TILE_ROWS)
    for dim in reversed(longer):
        room = options.CAST_PIECE_ELEMENTS // (prod(sizes.values()) // sizes[dim])
        if sizes[dim] < room:
            sizes[dim] = -(-shape[dim] // -(-shape[dim] // room))  # pieces of one size, and no small rest
    return sizes


def _cut(tensor: torch.Tensor, tile: Mapping[int, int]) -> list[torch.Tensor]:
    pieces = [tensor]
    for dim, size in tile.items():
        if size < tensor.shape[dim]:
            pieces = [part for piece in pieces for part in torch.split(piece, size, dim)]
    return pieces


def _copy_aligned(target: torch.Tensor, source: Source) -> None:
    copy_in_thread(target, source.on_host(), source.factors)
