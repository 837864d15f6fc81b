"""Basic indexing on entries, shapes and strides, as torch does it: pure, without data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import EllipsisType
from typing import TypeAlias

from sluice._errors import UnsupportedError
from sluice._geometry import contiguous_stride
from sluice.records import Entry, Part

__all__ = ["Key", "boxes", "slice_entry", "slice_view"]

Index: TypeAlias = int | slice | EllipsisType | None
Key: TypeAlias = Index | tuple[Index, ...]


def boxes(shape: tuple[int, ...], most_elements: int) -> Iterator[tuple[slice, ...]]:
    """Yield keys that cut a tensor into boxes of at most ``most_elements``, in the order of its elements.

    Args:
        shape: Sizes of the tensor, in elements.
        most_elements: At least 1.
    """
    if not shape or 0 in shape:
        yield (slice(None),) * len(shape)
        return
    row = 1  # elements behind one position of the dimension that is looked at
    for size in shape[1:]:
        row *= size
    if row > most_elements:
        for position in range(shape[0]):
            for rest in boxes(shape[1:], most_elements):
                yield (slice(position, position + 1), *rest)
        return
    step = most_elements // row
    for start in range(0, shape[0], step):
        yield (slice(start, min(start + step, shape[0])), *(slice(None) for _ in shape[1:]))


def slice_entry(entry: Entry, key: Key) -> Entry:
    """Return the entry that ``tensor[key]`` is; of an assembled one only the parts that the key touches remain.

    Raises:
        IndexError: An integer is out of range, or there are more indices than dimensions.
        TypeError: The key is of another kind.
        ValueError: A step is not positive.
        UnsupportedError: The tensor is sparse or quantized.
    """
    if entry.composite is not None:
        raise UnsupportedError(f"a {entry.layout} tensor is read whole or not at all")
    shape, stride, start = slice_view(entry.shape, entry.stride, key)
    if not entry.parts:
        return replace(entry, shape=shape, stride=stride, storage_offset=entry.storage_offset + start)
    keys = _expand(key if isinstance(key, tuple) else (key,), len(entry.shape))
    parts = tuple(_slice_parts(entry, keys)) if 0 not in shape else ()
    if not parts:  # an empty tensor has no elements to assemble, only a shape
        first = entry.parts[0].entry.storage
        return replace(entry, shape=shape, stride=contiguous_stride(shape), storage=first, parts=())
    return replace(entry, shape=shape, stride=contiguous_stride(shape), parts=parts)


def _slice_parts(entry: Entry, keys: list[int | slice | None]) -> Iterator[Part]:
    for part in entry.parts:
        picked = _pick(part, keys, entry.shape)
        if picked is not None:
            inner, start = picked
            yield Part(entry=slice_entry(part.entry, inner), start=start)


def _pick(
    part: Part, keys: list[int | slice | None], whole: tuple[int, ...]
) -> tuple[tuple[int | slice | None, ...], tuple[int, ...]] | None:
    """Return the key that selects a part's share, and where that lands in the selection; None where it has no share."""
    inner: list[int | slice | None] = []
    landed: list[int] = []
    dim = 0
    for one in keys:
        if one is None:
            inner.append(None)
            landed.append(0)
            continue
        first, size = part.start[dim], part.entry.shape[dim]
        if isinstance(one, slice):
            wanted = range(*one.indices(whole[dim]))
            low = max(0, -(-(first - wanted.start) // wanted.step))
            high = min(len(wanted), -(-(first + size - wanted.start) // wanted.step))
            if low >= high:
                return None
            inner.append(slice(wanted[low] - first, wanted[high - 1] - first + 1, wanted.step))
            landed.append(low)
        else:
            at = _position(one, whole[dim], dim) - first
            if not 0 <= at < size:
                return None
            inner.append(at)
        dim += 1
    return tuple(inner), tuple(landed)


def slice_view(
    shape: tuple[int, ...], stride: tuple[int, ...], key: Key
) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, stride and first element of the view that ``tensor[key]`` is.

    Args:
        shape: Sizes of the tensor, in elements.
        stride: Steps of the tensor, in elements.
        key: Integers, slices with positive steps, ``...`` and None, alone or in a tuple.

    Raises:
        IndexError: An integer is out of range, or there are more indices than dimensions.
        TypeError: The key is of another kind.
        ValueError: A step is not positive.
    """
    keys = _expand(key if isinstance(key, tuple) else (key,), len(shape))
    new_shape: list[int] = []
    new_stride: list[int] = []
    start = dim = 0
    for one in keys:
        if one is None:
            new_shape.append(1)
            new_stride.append(0)
            continue
        size, step = shape[dim], stride[dim]
        dim += 1
        if isinstance(one, slice):
            if one.step is not None and one.step <= 0:
                raise ValueError(f"a slice step must be positive, not {one.step}")
            picked = range(*one.indices(size))
            start += (picked.start if picked else 0) * step
            new_shape.append(len(picked))
            new_stride.append(step * picked.step)
        else:
            start += _position(one, size, dim - 1) * step
    return tuple(new_shape), tuple(new_stride), start


def _expand(keys: tuple[Index, ...], rank: int) -> list[int | slice | None]:
    """Return one key for each dimension, with None where one is added."""
    for one in keys:
        is_integer = isinstance(one, int) and not isinstance(one, bool)
        if not (is_integer or one is None or one is Ellipsis or isinstance(one, slice)):
            raise TypeError(f"only integers, slices, ... and None select without reading, not {type(one).__name__}")
    used = sum(one is not None and one is not Ellipsis for one in keys)
    if used > rank:
        raise IndexError(f"too many indices: {used} for a tensor of {rank} dimensions")
    gaps = [number for number, one in enumerate(keys) if one is Ellipsis]
    if len(gaps) > 1:
        raise IndexError("an index can have only one ellipsis")
    at = gaps[0] if gaps else len(keys)
    filler: list[int | slice | None] = [slice(None)] * (rank - used)
    before = [one for one in keys[:at] if one is not Ellipsis]
    after = [one for one in keys[at + 1 :] if one is not Ellipsis]
    return [*before, *filler, *after]


def _position(index: int, size: int, dim: int) -> int:
    if not -size <= index < size:
        raise IndexError(f"index {index} is out of range for dimension {dim} with size {size}")
    return index % size
