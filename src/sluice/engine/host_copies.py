"""Copies from staging to host memory, in pieces that keep torch in the calling thread and allocate almost nothing.

Bytes may lie at any address: tensors in foreign files, and items of a distributed checkpoint, start at any offset.
Elements at an address that is not a multiple of their size are first moved to one that is, a piece at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Mapping
from math import prod

import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import is_castable, torch_dtype
from sluice._private_torch import copy_each, neg_view
from sluice.engine.packs import Steps, compute, decode_packs, scratch
from sluice.engine.staging import StagingBuffer
from sluice.records import Constant, Copy, Elements, elements_of
from sluice.records.geometry import CopyPiece, collapse, cut, span_elements

__all__ = ["BITS", "StridedBytes", "constant_bytes", "copy_in_pieces", "copy_in_thread", "staged_bytes"]

#: By item size in bytes: the dtype in which elements are copied if nothing is computed.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


class StridedBytes(Struct, frozen=True):
    """A strided view of bytes on the host: the source of a copy. Of packed elements, shape and steps count packs."""

    #: The bytes from the first to the last element: one dimension of uint8, at any address.
    raw: torch.Tensor
    #: Dtype of the elements.
    dtype: torch.dtype
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension, in elements.
    stride: tuple[int, ...]
    #: The computation with the elements.
    elements: Elements = elements_of("uint8")

    @property
    def aligned(self) -> bool:
        """Whether the address of its bytes is a multiple of the item size; packs begin at any address."""
        return self.elements.packing is not None or self.raw.data_ptr() % self.dtype.itemsize == 0

    def on_host(self) -> torch.Tensor:
        """Return the view itself, before it is computed; if it is not aligned, all of its bytes are moved."""
        return self.seen_in(self.raw if self.aligned else self.raw.clone())

    def seen_in(self, raw: torch.Tensor) -> torch.Tensor:
        """Return the view of a copy of the bytes; of packs, as bytes in one more dimension."""
        if self.elements.packing is not None:
            item = self.elements.packing.nbytes
            steps = (*(step * item for step in self.stride), 1)
            return raw.as_strided((*self.shape, item), steps, raw.storage_offset())
        seen = raw.view(self.dtype).as_strided(self.shape, self.stride, raw.storage_offset() // self.dtype.itemsize)
        if "conj" in self.elements.math_bits:
            seen = seen.conj()
        if "neg" in self.elements.math_bits:
            seen = neg_view(seen)
        return seen


def staged_bytes(copy: Copy, buffer: StagingBuffer, first: int, target_dtype: str) -> StridedBytes:
    """Return the source of a copy out of a staging buffer, as integers if every bit is copied unchanged.

    Args:
        copy: Which elements.
        buffer: The buffer that they were read into.
        first: Where the first byte of the read lies in it.
        target_dtype: Name of the dtype that they become.
    """
    item = copy.elements.item_bytes
    raw = torch.frombuffer(
        buffer.memory,
        dtype=torch.uint8,
        count=span_elements(copy.shape, copy.source_stride) * item,
        offset=buffer.start + first + copy.offset,
    )
    dtype = BITS[item] if copy.dtype == target_dtype and not copy.elements.computed else torch_dtype(copy.dtype)
    return StridedBytes(raw, dtype, copy.shape, copy.source_stride, copy.elements)


def constant_bytes(constant: Constant) -> StridedBytes:
    """Return one element, repeated by strides of 0, as the source of a copy."""
    elements = constant.elements
    exact, dtype = torch.float64 if is_castable(elements.dtype) else torch.int64, torch_dtype(elements.dtype)
    written = torch.uint8 if "x2" in elements.dtype else dtype  # two elements, both 0
    element = torch.tensor([constant.value], dtype=exact, device="cpu").to(written)
    stride = (0,) * len(constant.shape)
    return StridedBytes(element.view(torch.uint8), dtype, constant.shape, stride, elements)


def copy_in_pieces(target: torch.Tensor, source: StridedBytes) -> None:
    """Copy on the host, in pieces small enough that torch stays in this thread: the readers use every core."""
    if source.elements.packing is not None:
        decode_packs(target, source.on_host(), source.elements.packing, source.elements.arithmetic)
    elif source.aligned or not target.numel():
        copy_in_thread(target, source.on_host(), source.elements.arithmetic)
    else:
        for part, moved in _moved(target, source):
            copy_in_thread(part, moved.on_host(), moved.elements.arithmetic)


def _moved(target: torch.Tensor, source: StridedBytes) -> Iterator[tuple[torch.Tensor, StridedBytes]]:
    """Yield the parts of a copy, the bytes of each in one scratch that holds those of one part."""
    shape, step, target_step = collapse(source.shape, source.stride, target.stride())
    nbytes = source.raw.numel()
    whole = CopyPiece(0, nbytes, shape, step, target_step, int(target.storage_offset()))
    room = scratch.of_at_least(defaults.MOVED_BYTES)
    for piece in cut(whole, source.dtype.itemsize, limit_bytes=defaults.MOVED_BYTES, gap_bytes=defaults.MOVED_BYTES):
        # Not copy_, which starts torch's threads for this many bytes.
        ctypes.memmove(room.data_ptr(), source.raw.data_ptr() + piece.start_byte, piece.nbytes)
        part = target.as_strided(piece.shape, piece.target_stride, piece.target_start)
        yield part, replace(source, raw=room[: piece.nbytes], shape=piece.shape, stride=piece.source_stride)


def copy_in_thread(target: torch.Tensor, source: torch.Tensor, steps: Steps = ()) -> None:
    """Compute elements in pieces that torch does not spread over its own threads; a source on a device as a whole.

    If one tensor is transposed against the other, the pieces are tiles, so that each cache line that a tile fetches is
    used up before it is evicted.
    """
    if target.numel() <= defaults.CAST_PIECE_ELEMENTS or source.device != target.device:
        compute(target, source, steps)
        return
    tile = _tile(target, source)
    pieces = _cut(target, tile), _cut(source, tile)
    if not steps:
        # One call for all pieces: the interpreter lock is released for the whole of it.
        copy_each(*pieces)
        return
    for into, piece in zip(*pieces, strict=True):
        compute(into, piece, steps)


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
        sizes[near] = min(shape[near], defaults.TILE_ROWS)
    for dim in reversed(longer):
        room = defaults.CAST_PIECE_ELEMENTS // (prod(sizes.values()) // sizes[dim])
        if sizes[dim] < room:
            sizes[dim] = -(-shape[dim] // -(-shape[dim] // room))  # pieces of one size, and no small rest
    return sizes


def _cut(tensor: torch.Tensor, tile: Mapping[int, int]) -> list[torch.Tensor]:
    pieces = [tensor]
    for dim, size in tile.items():
        if size < tensor.shape[dim]:
            pieces = [part for piece in pieces for part in torch.split(piece, size, dim)]
    return pieces
