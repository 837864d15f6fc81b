"""Arithmetic of strided tensors: alignment, strides, collapsing and cutting copies.

Pure functions: no I/O, no torch. Shapes and strides are in elements; ``*_bytes`` are bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import TypeVar

from msgspec import Struct

__all__ = [
    "CopyPiece",
    "collapse",
    "contiguous_stride",
    "cut",
    "is_dense",
    "overlapping",
    "round_down",
    "round_up",
    "span_elements",
    "split_evenly",
]

_Member = TypeVar("_Member")


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple that is at least ``value``."""
    return -(-value // multiple) * multiple


def round_down(value: int, multiple: int) -> int:
    """Return the largest multiple that is at most ``value``."""
    return value // multiple * multiple


# Cached, here and below: most models have few shapes, and each is asked for several times per tensor.
@lru_cache(maxsize=1024)
def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the row-major stride of ``shape``, equal to ``torch.empty(shape).stride()``."""
    stride = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


@lru_cache(maxsize=1024)
def span_elements(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements from the first to the last one touched, inclusive; 0 for an empty tensor."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


@lru_cache(maxsize=1024)
def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Return whether the elements fill their span without gaps and overlap, in any order of dimensions."""
    if 0 in shape:
        return True
    expected = 1
    for step, size in sorted((step, size) for size, step in zip(shape, stride, strict=True) if size != 1):
        if step != expected:
            return False
        expected *= size
    return True


def collapse(
    shape: tuple[int, ...], source_stride: tuple[int, ...], target_stride: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of an equivalent copy with the fewest dimensions, the largest source step first.

    Two tensors of the same dense layout collapse to one dimension of step 1, regardless of their rank.
    """
    if source_stride == target_stride == contiguous_stride(shape):  # most copies; ten times as fast
        return (math.prod(shape),), (1,), (1,)
    dims = sorted(
        (dim for dim in zip(shape, source_stride, target_stride, strict=True) if dim[0] != 1),
        key=lambda dim: (-dim[1], -dim[2]),
    )
    merged: list[tuple[int, int, int]] = []
    for size, source, target in dims:
        if merged and merged[-1][1] == size * source and merged[-1][2] == size * target:
            merged[-1] = (merged[-1][0] * size, source, target)
        else:
            merged.append((size, source, target))
    if not merged:
        return (1,), (1,), (1,)
    sizes, sources, targets = zip(*merged, strict=True)
    return tuple(sizes), tuple(sources), tuple(targets)


def split_evenly(start: int, nbytes: int, *, limit_bytes: int, align_bytes: int) -> Iterator[tuple[int, int]]:
    """Split a range into the fewest parts of about equal size and at most about ``limit_bytes``.

    Inner boundaries are multiples of ``align_bytes``, so a part may exceed the limit by less than ``align_bytes``.

    Yields:
        Offset and size of each part, in bytes.
    """
    parts = max(1, -(-nbytes // limit_bytes))
    first, end = start, start + nbytes
    for count in range(1, parts + 1):
        last = end if count == parts else round_down(start + nbytes * count // parts, align_bytes)
        if last > first:
            yield first, last - first
            first = last


class CopyPiece(Struct, frozen=True, gc=False):
    """A strided copy, or the part of one whose source bytes fit one read."""

    #: Position of the first source byte, usually in a file.
    start_byte: int
    #: Source bytes from the first to the last element, inclusive.
    nbytes: int
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension in the source, in elements.
    source_stride: tuple[int, ...]
    #: Step of each dimension in the target, in elements.
    target_stride: tuple[int, ...]
    #: Position of element 0 in the target, in elements.
    target_start: int


def cut(whole: CopyPiece, item_bytes: int, *, limit_bytes: int, gap_bytes: int) -> Iterator[CopyPiece]:
    """Cut a collapsed copy into pieces of at most ``limit_bytes`` source bytes, in source order.

    Contiguous runs are cut at multiples of ``limit_bytes`` in the file, so that all copies of the same bytes are cut at
    the same positions and can share a read. A piece never contains a gap between runs of more than ``gap_bytes``.

    Raises:
        ValueError: ``limit_bytes`` is smaller than one element.
    """
    if limit_bytes < item_bytes:
        raise ValueError(f"a read of {limit_bytes} bytes cannot hold an element of {item_bytes} bytes")
    if whole.shape[1:] == () and whole.source_stride[0] == 1:
        yield from _cut_run(whole, item_bytes, limit_bytes)
        return
    size, step_bytes = whole.shape[0], whole.source_stride[0] * item_bytes
    inner_shape, inner_stride = whole.shape[1:], whole.source_stride[1:]
    inner_bytes = span_elements(inner_shape, inner_stride) * item_bytes
    widest_gap = max(step_bytes - inner_bytes, _widest_gap(inner_shape, inner_stride) * item_bytes)
    if widest_gap > gap_bytes or inner_bytes + step_bytes > limit_bytes:
        for index in range(size):
            row = _without_first(_rows(whole, index, 1, item_bytes))
            yield from cut(row, item_bytes, limit_bytes=limit_bytes, gap_bytes=gap_bytes)
        return
    # Count each row up to the start of the next, so that copies of other columns of these rows are cut at the same rows
    # and can share a read.
    count = size if step_bytes == 0 else (limit_bytes - max(inner_bytes, step_bytes)) // step_bytes + 1
    for index in range(0, size, count):
        yield _rows(whole, index, min(count, size - index), item_bytes)


def _cut_run(whole: CopyPiece, item_bytes: int, limit_bytes: int) -> Iterator[CopyPiece]:
    start, end = whole.start_byte, whole.start_byte + whole.nbytes
    grid = round_down(limit_bytes, item_bytes)
    phase = start % item_bytes  # elements of a misaligned tensor cross the grid; cut between elements
    target_step = whole.target_stride[0]
    first = start
    if end <= round_down(start - phase, grid) + grid + phase:
        yield whole
        return
    while first < end:
        last = min(end, round_down(first - phase, grid) + grid + phase)
        yield CopyPiece(
            start_byte=first,
            nbytes=last - first,
            shape=((last - first) // item_bytes,),
            source_stride=(1,),
            target_stride=(target_step,),
            target_start=whole.target_start + (first - start) // item_bytes * target_step,
        )
        first = last


def _rows(piece: CopyPiece, first: int, count: int, item_bytes: int) -> CopyPiece:
    shape = (count, *piece.shape[1:])
    return CopyPiece(
        start_byte=piece.start_byte + first * piece.source_stride[0] * item_bytes,
        nbytes=span_elements(shape, piece.source_stride) * item_bytes,
        shape=shape,
        source_stride=piece.source_stride,
        target_stride=piece.target_stride,
        target_start=piece.target_start + first * piece.target_stride[0],
    )


def _without_first(piece: CopyPiece) -> CopyPiece:
    """Drop a first dimension of size 1."""
    shape, source, target = (sizes[1:] or (1,) for sizes in (piece.shape, piece.source_stride, piece.target_stride))
    return CopyPiece(piece.start_byte, piece.nbytes, shape, source, target, piece.target_start)


def _widest_gap(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the largest number of elements that a step skips before the next run."""
    return max(
        (stride[i] - span_elements(shape[i + 1 :], stride[i + 1 :]) for i in range(len(shape)) if shape[i] > 1),
        default=0,
    )


def overlapping(members: Iterable[_Member], span: Callable[[_Member], tuple[int, int]]) -> Iterator[list[_Member]]:
    """Split members, in the order of the starts of their spans, into groups whose spans overlap or touch."""
    group: list[_Member] = []
    reached = -1
    for member in members:
        start, end = span(member)
        if group and start > reached:
            yield group
            group = []
        group.append(member)
        reached = max(reached, end)
    if group:
        yield group
