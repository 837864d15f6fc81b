"""Entries derived from entries: permuted, joined, reshaped, padded, multiplied. Pure; no data, no torch.

A result that strides can express stays a view of its storage. Other results are assembled from boxes, one part per
box; parts never nest. An operation that cannot be done raises ``ValueError`` with a clause for the user.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice.entries.slicing import slice_entry
from sluice.records import NO_STORAGE, Arithmetic, Entry, Part, elements_of, row_major
from sluice.records.geometry import contiguous_stride

__all__ = ["compute", "join", "narrow", "pad", "permute", "reshape", "stack"]

Shape = tuple[int, ...]


def permute(entry: Entry, order: Sequence[int]) -> Entry:
    """Return the entry with its dimensions permuted, as ``tensor.permute(order)``."""

    def reordered(values: Shape) -> Shape:
        return tuple(values[dim] for dim in order)

    if not entry.parts:
        return replace(entry, shape=reordered(entry.shape), stride=reordered(entry.stride))
    parts = [Part(entry=permute(part.entry, order), start=reordered(part.start)) for part in entry.parts]
    return _whole(entry, reordered(entry.shape), parts)


def narrow(entry: Entry, dim: int, start: int, size: int) -> Entry:
    """Return ``size`` positions of a dimension from ``start``, as ``tensor.narrow``."""
    part = slice_entry(entry, (*(slice(None),) * dim, slice(start, start + size)))
    return _whole(part, part.shape, part.parts) if part.parts else part


def compute(entry: Entry, operation: Arithmetic, number: float) -> Entry:
    """Return the entry with every element multiplied by a number or added to it, in the dtype of the entry."""
    if not entry.parts:
        steps = (*entry.elements.arithmetic, (operation, number))
        return replace(entry, elements=replace(entry.elements, arithmetic=steps))
    parts = (Part(entry=compute(part.entry, operation, number), start=part.start) for part in entry.parts)
    return replace(entry, parts=tuple(parts))


def join(entries: Sequence[Entry], dim: int) -> Entry:
    """Return the entries concatenated along a dimension, as ``torch.cat``.

    Raises:
        ValueError: One lacks the dimension, their shapes differ in other dimensions, or their dtypes differ.
    """
    first = entries[0]
    dtype, cast = _common_dtype(entries)
    for entry in entries:
        if len(entry.shape) <= dim:
            raise ValueError(f"shape {list(entry.shape)} has no dimension {dim}")
        if _without(entry.shape, dim) != _without(first.shape, dim):
            raise ValueError(f"shapes {list(first.shape)} and {list(entry.shape)} differ in more than dimension {dim}")
    parts, at = [], 0
    for entry in entries:
        parts += [replace(part, start=_moved(part.start, dim, at)) for part in _parts(entry)]
        at += entry.shape[dim]
    like = replace(
        first,
        elements=replace(first.elements, dtype=dtype),
        cast=cast,
        parameter=all(entry.parameter for entry in entries),
        requires_grad=any(entry.requires_grad for entry in entries),
    )
    return _whole(like, (*first.shape[:dim], at, *first.shape[dim + 1 :]), parts)


def stack(entries: Sequence[Entry], dim: int) -> Entry:
    """Return the entries stacked along a new dimension, as ``torch.stack``.

    Raises:
        ValueError: Their shapes or their dtypes differ.
    """
    key = (*(slice(None),) * dim, None)
    shapes = {entry.shape for entry in entries}
    if len(shapes) > 1:
        raise ValueError("shapes " + " and ".join(str(list(shape)) for shape in sorted(shapes)) + " differ")
    return join([slice_entry(entry, key) for entry in entries], dim)


def pad(entry: Entry, dim: int, size: int, value: float) -> Entry:
    """Return the entry padded at the end of a dimension with ``value``, up to ``size`` positions."""
    shape = (*entry.shape[:dim], size - entry.shape[dim], *entry.shape[dim + 1 :])
    constant = Entry(
        elements=elements_of(entry.dtype),
        shape=shape,
        stride=(0,) * len(shape),
        storage=NO_STORAGE,
        constant=value,
        cast=entry.cast,
        parameter=entry.parameter,
        requires_grad=entry.requires_grad,
    )
    return join([entry, constant], dim)


def reshape(entry: Entry, shape: Sequence[int]) -> Entry:
    """Return the entry in a new shape, with its elements in row-major order, as ``tensor.reshape``.

    Raises:
        ValueError: The numbers of elements differ, or the result would need too many boxes.
    """
    sizes = _with_inferred(shape, entry)
    if entry.numel == 0:
        return _whole(entry, sizes, ())
    groups = _groups(entry.shape, sizes)
    parts: list[Part] = []
    for part in _parts(entry):
        for box in _boxes(part, groups):
            parts.append(box)
            if len(parts) > defaults.RESHAPE_BOXES:
                raise ValueError(
                    f"shape {list(sizes)} needs more than {defaults.RESHAPE_BOXES} boxes with these strides; "
                    "load it unchanged and reshape the tensor"
                )
    return _whole(entry, sizes, parts)


def _parts(entry: Entry) -> tuple[Part, ...]:
    """Return an entry as parts, without the properties of the whole."""
    if entry.parts:
        return entry.parts
    bare = replace(entry, cast=None, origin="", parameter=False, requires_grad=False)
    return (Part(entry=bare, start=(0,) * len(entry.shape)),)


def _whole(like: Entry, shape: Shape, parts: Sequence[Part]) -> Entry:
    """Return an entry of the given shape made of parts; a view if one part covers all of it."""
    held = tuple(part for part in parts if part.entry.numel)
    view = row_major(like.dtype, shape, NO_STORAGE)
    if len(held) == 1 and held[0].entry.constant is None and held[0].entry.dtype == like.dtype:
        view, held = held[0].entry, ()
    return replace(
        like,
        shape=shape,
        stride=view.stride,
        storage=view.storage,
        storage_offset=view.storage_offset,
        elements=view.elements,
        constant=None,
        parts=held,
    )


def _common_dtype(entries: Sequence[Entry]) -> tuple[str, str | None]:
    """Return the dtype of a whole, and the dtype that it is cast to."""
    dtypes = {entry.dtype for entry in entries}
    casts = {entry.cast for entry in entries}
    finished = casts.pop() if len(casts) == 1 else None
    if casts or (len(dtypes) > 1 and finished is None):
        found = " and ".join(sorted({entry.cast or entry.dtype for entry in entries} | dtypes))
        raise ValueError(f"dtypes {found} differ; cast them to one dtype first")
    return (dtypes.pop() if len(dtypes) == 1 else str(finished)), finished


def _without(shape: Shape, dim: int) -> Shape:
    return shape[:dim] + shape[dim + 1 :]


def _moved(start: Shape, dim: int, by: int) -> Shape:
    return (*start[:dim], start[dim] + by, *start[dim + 1 :])


def _with_inferred(shape: Sequence[int], entry: Entry) -> Shape:
    """Return a shape with -1 replaced by the inferred size."""
    known = prod(size for size in shape if size != -1)
    sizes = tuple(shape)
    if -1 in sizes and known:
        sizes = tuple(entry.numel // known if size == -1 else size for size in sizes)
    if -1 in sizes or prod(sizes) != entry.numel:
        raise ValueError(f"{entry.numel} elements of shape {list(entry.shape)} do not fit {list(shape)}")
    return sizes


#: A range of old dimensions, their sizes, and the sizes of the new dimensions that hold the same elements.
_Group = tuple[slice, Shape, Shape]


def _groups(old: Shape, new: Shape) -> list[_Group]:
    """Divide two shapes with the same positive number of elements into the smallest groups of equal products."""
    groups: list[_Group] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first, first_new = i, j
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while prod(old[first:i]) != prod(new[first_new:j]):
            if prod(old[first:i]) < prod(new[first_new:j]):
                i += 1
            else:
                j += 1
        groups.append((slice(first, i), old[first:i], new[first_new:j]))
    return groups


def _boxes(part: Part, groups: Sequence[_Group]) -> Iterator[Part]:
    """Yield the boxes of the new shape that hold the elements of a part of the old shape."""
    pending = [part]
    while pending:
        box = pending.pop()
        shape: list[int] = []
        stride: list[int] = []
        start: list[int] = []
        for where, old, new in groups:
            regrouped = _regroup(box.entry.shape[where], box.entry.stride[where], box.start[where], old, new)
            if regrouped is None:
                pending += _halves(box, where)
                break
            shape += regrouped[0]
            stride += regrouped[1]
            start += regrouped[2]
        else:
            yield Part(entry=replace(box.entry, shape=tuple(shape), stride=tuple(stride)), start=tuple(start))


def _halves(part: Part, where: slice) -> list[Part]:
    """Split a part along the first dimension of a group that is larger than 1."""
    dim = next(dim for dim in range(where.start, where.stop) if part.entry.shape[dim] > 1)
    middle = part.entry.shape[dim] // 2
    before = (slice(None),) * dim
    return [  # the second half first: the last box is processed next
        Part(entry=slice_entry(part.entry, (*before, slice(middle, None))), start=_moved(part.start, dim, middle)),
        Part(entry=slice_entry(part.entry, (*before, slice(0, middle))), start=part.start),
    ]


def _regroup(shape: Shape, stride: Shape, start: Shape, old: Shape, new: Shape) -> tuple[Shape, Shape, Shape] | None:
    """Return the shape, stride and start of a box in the new dimensions of its group; None if it is not one box there.

    Args:
        shape: Sizes of the box in the old dimensions.
        stride: Its steps.
        start: Its first element in the old dimensions.
        old: Sizes of the old dimensions.
        new: Sizes of the new dimensions, with the same product.
    """
    varying = [dim for dim, size in enumerate(shape) if size > 1]
    if varying and shape[varying[0] + 1 :] != old[varying[0] + 1 :]:
        return None  # not contiguous in the order of elements
    first = sum(at * step for at, step in zip(start, contiguous_stride(old), strict=True))
    box = _box_of_run(first, prod(shape), new)
    if box is None:
        return None
    sizes, begin = box
    steps = _view_stride(shape, stride, sizes)
    return None if steps is None else (sizes, steps, begin)


def _box_of_run(first: int, count: int, shape: Shape) -> tuple[Shape, Shape] | None:
    """Return the shape and start of a run of elements as a box of a tensor; None if it is not one box."""
    steps = contiguous_stride(shape)
    begin = tuple(first // step % size for step, size in zip(steps, shape, strict=True))
    for dim in reversed(range(len(shape))):
        whole, rest = divmod(count, steps[dim])
        if rest == 0 and first % steps[dim] == 0 and begin[dim] + whole <= shape[dim]:
            return ((1,) * dim + (whole,) + shape[dim + 1 :]), begin
    return ((), ()) if not shape else None


def _view_stride(shape: Shape, stride: Shape, new: Shape) -> Shape | None:
    """Return the stride of a view with a new shape, as ``tensor.view`` computes it; None if a copy is needed."""
    merged: list[tuple[int, int]] = []  # size and step of dimensions after merging adjacent ones
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    steps = [0] * len(new)
    size, step = merged.pop() if merged else (1, 1)
    for dim in reversed(range(len(new))):
        if size == 1 and merged and new[dim] > 1:
            size, step = merged.pop()
        if size % new[dim]:
            return None
        steps[dim] = step
        size //= new[dim]
        step *= new[dim]
    return tuple(steps)
