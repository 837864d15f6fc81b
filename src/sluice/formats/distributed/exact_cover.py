"""Whether boxes cover a larger box exactly: every element in one of them, none in two. Pure.

A box is the alternating sum of the corners of orthants: +1 at its first corner, and the sign changes with each
dimension in which a corner lies at the end. Boxes cover the whole exactly when all their corners together, with these
signs, cancel to those of the whole. That takes as many steps as there are corners, whatever the shape of the partition;
comparing the boxes in pairs would take the square. Where corners are left over, the first of them in the order of the
indices is the first element that is covered not once, and its sum says how often.

Dimensions that no box cuts have no say. A box that is cut in ``k`` dimensions has ``2 ** k`` corners.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from typing import NamedTuple, TypeAlias

__all__ = ["Miscount", "cut_dimensions", "first_miscount"]

#: First element of a box and its size, in each dimension.
Box: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"


class Miscount(NamedTuple):
    """An element that is not in exactly one box."""

    #: Its index in the whole.
    element: tuple[int, ...]
    #: Boxes that hold it.
    boxes: int


def cut_dimensions(shape: Sequence[int], boxes: Sequence[Box]) -> list[int]:
    """Return the dimensions in which some box is smaller than the whole."""
    return [dim for dim, size in enumerate(shape) if any(sizes[dim] != size for _, sizes in boxes)]


def first_miscount(shape: Sequence[int], boxes: Sequence[Box]) -> Miscount | None:
    """Return the first element of the whole that is not in exactly one box, or None.

    Args:
        shape: Sizes of the whole, none of them 0.
        boxes: Boxes inside the whole, none of them empty.
    """
    cut = cut_dimensions(shape, boxes)
    whole = ((0,) * len(shape), tuple(shape))
    corners = [(corner, -sign) for corner, sign in _corners(whole, cut)]
    for box in boxes:
        corners += _corners(box, cut)
    corners.sort()
    for corner, group in groupby(corners, key=lambda signed: signed[0]):
        left = sum(sign for _, sign in group)
        if left:
            place = dict(zip(cut, corner, strict=True))
            return Miscount(tuple(place.get(dim, 0) for dim in range(len(shape))), 1 + left)
    return None


def _corners(box: Box, cut: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    start, sizes = box
    edges = [((start[dim], 1), (start[dim] + sizes[dim], -1)) for dim in cut]
    for chosen in product(*edges):
        sign = 1
        for _, side in chosen:
            sign *= side
        yield tuple(edge for edge, _ in chosen), sign
