"""Check that boxes cover a larger box exactly: every element is in one and only one of them. Pure.

A box is a signed sum of orthants, one at each of its corners: the sign is +1 at the first corner and flips with each
dimension in which the corner is at the end of the box. Boxes cover the whole exactly if and only if the signed corners
of all boxes cancel to the signed corners of the whole. The cost is linear in the number of corners (and a sort),
for any shape of the partition; comparing boxes in pairs would be quadratic. If corners are left over, the first in
index order is the first element that is not covered exactly once, and its sum gives the number of boxes that cover it.

Dimensions in which every box spans the whole are ignored. A box that is cut in ``k`` dimensions has ``2 ** k`` corners.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby, product
from typing import NamedTuple, TypeAlias

__all__ = ["Miscount", "cut_dimensions", "first_miscount"]

#: Index of the first element of a box and the size of the box, in each dimension.
Box: TypeAlias = "tuple[tuple[int, ...], tuple[int, ...]]"


class Miscount(NamedTuple):
    """An element that is not in exactly one box."""

    #: Index in the whole.
    element: tuple[int, ...]
    #: Number of boxes that contain it.
    boxes: int


def cut_dimensions(shape: Sequence[int], boxes: Sequence[Box]) -> list[int]:
    """Return the dimensions in which at least one box is smaller than the whole."""
    return [dim for dim, size in enumerate(shape) if any(sizes[dim] != size for _, sizes in boxes)]


def first_miscount(shape: Sequence[int], boxes: Sequence[Box]) -> Miscount | None:
    """Return the first element of the whole that is not in exactly one box, or None.

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
            return Miscount(tuple(index.get(dim, 0) for dim in range(len(shape))), 1 + excess)
    return None


def _corners(box: Box, cut: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    """Yield the corners of a box in the cut dimensions, with their signs."""
    start, sizes = box
    edges = [((start[dim], 1), (start[dim] + sizes[dim], -1)) for dim in cut]
    for chosen in product(*edges):
        sign = 1
        for _, side in chosen:
            sign *= side
        yield tuple(edge for edge, _ in chosen), sign
