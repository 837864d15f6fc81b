"""Basic indexing of entries, shapes and strides with the semantics of torch; boxes of tensors. Pure; reads no data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from math import prod
from types import EllipsisType
from typing import TypeAlias

from msgspec.structs import replace

from sluice._errors import UnsupportedError
from sluice.records import Entry, Part
from sluice.records.geometry import contiguous_stride, round_down

__all__ = ["Key", "KeyItem", "boxes", "cut_dimensions", "first_miscount", "slice_entry", "slice_view"]

KeyItem: TypeAlias = int | slice | EllipsisType | None
Key: TypeAlias = KeyItem | tuple[KeyItem, ...]

#: Index of the first element of a box and the size of the box, in each dimension.
_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


def boxes(shape: tuple[int, ...], most_elements: int, multiple: int = 1) -> Iterator[tuple[slice, ...]]:
    """Yield keys that divide a tensor into boxes of at most ``most_elements``, in the order of its elements.

    Args:
        shape: Sizes of the tensor, in elements.
        most_elements: At least 1.
        multiple: Cut at multiples of it, where a box holds as many.
    """
    if not shape or 0 in shape:
        yield (slice(None),) * len(shape)
        return
    row = prod(shape[1:])  # elements at one position of the first dimension
    if row > most_elements:
        for position in range(shape[0]):
            for rest in boxes(shape[1:], most_elements, multiple):
                yield (slice(position, position + 1), *rest)
        return
    step = most_elements // row
    step = round_down(step, multiple) or step
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])), *(slice(None) for _ in shape[1:]))


def slice_entry(entry: Entry, key: Key) -> Entry:
    """Return the entry of ``tensor[key]``; an assembled entry keeps only the parts that the key touches.

    Raises:
        IndexError: An integer is out of range, or there are more indices than dimensions.
        TypeError: The key is of an unsupported type.
        ValueError: A step is not positive.
        UnsupportedError: The tensor is sparse or quantized.
    """
    if entry.composite is not None:
        raise UnsupportedError(f"a {entry.layout} tensor is read whole or not at all")
    shape, stride, start = slice_view(entry.shape, entry.stride, key)
    if not entry.parts:
        return replace(entry, shape=shape, stride=stride, storage_offset=entry.storage_offset + start)
    keys = _expand(key if isinstance(key, tuple) else (key,), len(entry.shape))
    picked = [(part.entry, _pick(part, keys, entry.shape)) for part in entry.parts if 0 not in shape]
    parts = tuple(Part(entry=slice_entry(inner, one[0]), start=one[1]) for inner, one in picked if one is not None)
    if not parts:  # an empty tensor has a shape, but no elements to assemble
        first = entry.parts[0].entry.storage
        return replace(entry, shape=shape, stride=contiguous_stride(shape), storage=first, parts=())
    return replace(entry, shape=shape, stride=contiguous_stride(shape), parts=parts)


def _pick(
    part: Part, keys: list[int | slice | None], whole: tuple[int, ...]
) -> tuple[tuple[int | slice | None, ...], tuple[int, ...]] | None:
    """Return the key of the selected box of a part and its start in the selection; None if nothing is selected."""
    inner: list[int | slice | None] = []
    start: list[int] = []
    dim = 0
    for item in keys:
        if item is None:
            inner.append(None)
            start.append(0)
            continue
        first, size = part.start[dim], part.entry.shape[dim]
        if isinstance(item, slice):
            selected = range(*item.indices(whole[dim]))
            low = max(0, -(-(first - selected.start) // selected.step))
            high = min(len(selected), -(-(first + size - selected.start) // selected.step))
            if low >= high:
                return None
            inner.append(slice(selected[low] - first, selected[high - 1] - first + 1, selected.step))
            start.append(low)
        else:
            at = _position(item, whole[dim], dim) - first
            if not 0 <= at < size:
                return None
            inner.append(at)
        dim += 1
    return tuple(inner), tuple(start)


def slice_view(
    shape: tuple[int, ...], stride: tuple[int, ...], key: Key
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return the shape, the stride and the first element of the view ``tensor[key]``.

    Args:
        shape: Sizes of the tensor, in elements.
        stride: Steps of the tensor, in elements.
        key: Integers, slices with positive steps, ``...`` and None, alone or in a tuple.

    Raises:
        IndexError: An integer is out of range, or there are more indices than dimensions.
        TypeError: The key is of an unsupported type.
        ValueError: A step is not positive.
    """
    keys = _expand(key if isinstance(key, tuple) else (key,), len(shape))
    new_shape: list[int] = []
    new_stride: list[int] = []
    start = dim = 0
    for item in keys:
        if item is None:
            new_shape.append(1)
            new_stride.append(0)
            continue
        size, step = shape[dim], stride[dim]
        dim += 1
        if isinstance(item, slice):
            if item.step is not None and item.step <= 0:
                raise ValueError(f"a slice step must be positive, not {item.step}")
            selected = range(*item.indices(size))
            start += (selected.start if selected else 0) * step
            new_shape.append(len(selected))
            new_stride.append(step * selected.step)
        else:
            start += _position(item, size, dim - 1) * step
    return tuple(new_shape), tuple(new_stride), start


def _expand(keys: tuple[KeyItem, ...], rank: int) -> list[int | slice | None]:
    """Return one key per dimension, and None for each added dimension."""
    for item in keys:
        is_integer = isinstance(item, int) and not isinstance(item, bool)
        if not (is_integer or item is None or item is Ellipsis or isinstance(item, slice)):
            raise TypeError(
                f"a lazy tensor can be indexed only with integers, slices, ... and None, not {type(item).__name__}"
            )
    used = sum(item is not None and item is not Ellipsis for item in keys)
    if used > rank:
        raise IndexError(f"too many indices: {used} for a tensor of {rank} dimensions")
    gaps = [position for position, item in enumerate(keys) if item is Ellipsis]
    if len(gaps) > 1:
        raise IndexError("an index can have only one ellipsis")
    at = gaps[0] if gaps else len(keys)
    filler: list[int | slice | None] = [slice(None)] * (rank - used)
    before = [item for item in keys[:at] if item is not Ellipsis]
    after = [item for item in keys[at + 1 :] if item is not Ellipsis]
    return [*before, *filler, *after]


def _position(index: int, size: int, dim: int) -> int:
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for dimension {dim} with size {size}")
    return index % size


def cut_dimensions(shape: Sequence[int], boxes: Sequence[_Box]) -> list[int]:
    """Return the dimensions in which at least one box is smaller than the whole: it has two corners in each of them."""
    return [dim for dim, size in enumerate(shape) if any(sizes[dim] != size for _, sizes in boxes)]


def first_miscount(shape: Sequence[int], boxes: Sequence[_Box]) -> tuple[tuple[int, ...], int] | None:
    """Return the first element of the whole that is not in exactly one box, and the number of its boxes; or None.

    A box is a signed sum of orthants, one at each of its corners: the sign is +1 at the first corner and flips with
    each dimension in which the corner is at the end of the box. Boxes cover the whole exactly if and only if the signed
    corners of all boxes cancel to the signed corners of the whole. The cost is linear in the number of corners (and a
    sort), for any shape of the partition; comparing boxes in pairs would be quadratic. If corners are left over, the
    first in index order is the first element that is not covered exactly once, and its sum gives the number of boxes
    that cover it.

    Args:
        shape: Size of the whole in each dimension, in elements; not 0.
        boxes: Boxes inside the whole; not empty.
    """
    cut = cut_dimensions(shape, boxes)
    whole = ((0,) * len(shape), tuple(shape))
    corners = [(corner, -sign) for corner, sign in _corners(whole, cut)]
    for box in boxes:
        corners += _corners(box, cut)
    corners.sort()
    for corner, group in groupby(corners, key=lambda signed: signed[0]):
        excess = sum(sign for _, sign in group)
        if excess:
            index = dict(zip(cut, corner, strict=True))
            return tuple(index.get(dim, 0) for dim in range(len(shape))), 1 + excess
    return None


def _corners(box: _Box, cut: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the corners of a box in the cut dimensions, with their signs."""
    start, sizes = box
    edges = [((start[dim], 1), (start[dim] + sizes[dim], -1)) for dim in cut]
    for chosen in product(*edges):
        yield tuple(edge for edge, _ in chosen), prod(side for _, side in chosen)
