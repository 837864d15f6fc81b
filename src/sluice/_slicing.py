"""Basic indexing on shapes and strides, as torch does it: pure, without data."""

from __future__ import annotations

from types import EllipsisType
from typing import TypeAlias

__all__ = ["Key", "slice_view"]

Index: TypeAlias = int | slice | EllipsisType | None
Key: TypeAlias = Index | tuple[Index, ...]


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
