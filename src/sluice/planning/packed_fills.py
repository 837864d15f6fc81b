"""Fills from packed elements: views in elements become strided boxes of packs.

A pack is read and decoded whole. A view that starts or ends inside packs takes a part of each pack at its borders, in
fills of their own, and every fill takes the same elements of each of its packs.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._errors import UnsupportedError
from sluice.records import Entry, Fill, Packing
from sluice.records.geometry import collapse

__all__ = ["packed_fills"]


class _View(Struct, frozen=True):
    """A strided view of decoded elements, and its place in the target; everything in elements."""

    shape: tuple[int, ...]
    source_stride: tuple[int, ...]
    target_stride: tuple[int, ...]
    #: First element in the storage.
    begin: int
    #: First element in the target.
    start: int

    def at(self, dim: int, index: int) -> _View:
        """Return the view at one position of a dimension, without it."""
        return _View(
            self.shape[:dim] + self.shape[dim + 1 :],
            self.source_stride[:dim] + self.source_stride[dim + 1 :],
            self.target_stride[:dim] + self.target_stride[dim + 1 :],
            self.begin + index * self.source_stride[dim],
            self.start + index * self.target_stride[dim],
        )


def packed_fills(piece: Entry, first: int, stride: tuple[int, ...], file: int, offset: int) -> Iterator[Fill]:
    """Yield the fills from a view of packed elements.

    Args:
        piece: A view of one storage.
        first: Position of its element 0 in the target, in elements.
        stride: Its steps in the target, in elements.
        file: Position of the file in the plan.
        offset: First byte of the storage in the file.

    Raises:
        UnsupportedError: It takes too many different parts of packs.
    """
    packing = piece.elements.packing
    assert packing is not None
    shape, source, target = collapse(piece.shape, piece.stride, stride)
    view = _View(shape, source, target, piece.storage_offset, first)
    for packs, taken in _boxes(view, packing):
        yield Fill(
            file=file,
            offset=offset + packs.begin * packing.nbytes,
            elements=replace(piece.elements, packing=taken),
            shape=packs.shape,
            source_stride=packs.source_stride,
            target_stride=packs.target_stride,
            target_start=packs.start,
        )


def _boxes(view: _View, packing: Packing) -> Iterator[tuple[_View, Packing]]:
    """Yield boxes of packs, whose source counts packs, with the elements that each takes."""
    within = [dim for dim, step in enumerate(view.source_stride) if step % packing.elements]
    run = within[-1] if within and view.source_stride[within[-1]] == 1 else None
    apart = [dim for dim in within if dim != run]  # steps inside packs: one position at a time
    count = prod(view.shape[dim] for dim in apart)
    if count > defaults.PACK_PARTS:
        raise UnsupportedError(
            f"this selection takes {count:,} different parts of packs of {packing.elements} elements ({packing.name})",
            advice="Read whole rows, and select from the finished tensor.",
        )
    if apart:
        for index in range(view.shape[apart[0]]):
            yield from _boxes(view.at(apart[0], index), packing)
    elif run is None:
        yield _packs(view, packing, 1, 1)
    else:
        yield from _run_boxes(view, packing, run)


def _run_boxes(view: _View, packing: Packing, run: int) -> Iterator[tuple[_View, Packing]]:
    """Yield the boxes of a view with one dimension of adjacent elements: a first part, whole packs, and a last part."""
    size, step = view.shape[run], view.target_stride[run]
    head = min(size, -view.begin % packing.elements)
    whole, tail = divmod(size - head, packing.elements)
    if head:
        yield _packs(view.at(run, 0), packing, head, step)
    if whole:
        first = view.at(run, head)
        packs, taken = _packs(first, packing, packing.elements, step)
        yield (
            replace(
                packs,
                shape=(*packs.shape, whole),
                source_stride=(*packs.source_stride, 1),
                target_stride=(*packs.target_stride, step * packing.elements),
            ),
            taken,
        )
    if tail:
        yield _packs(view.at(run, size - tail), packing, tail, step)


def _packs(view: _View, packing: Packing, taken: int, step: int) -> tuple[_View, Packing]:
    """Return the packs of the elements of a view, whose steps are whole packs, and what is taken of each."""
    begin, first = divmod(view.begin, packing.elements)
    packs = replace(view, source_stride=tuple(each // packing.elements for each in view.source_stride), begin=begin)
    return packs, replace(packing, first=first, taken=taken, target_step=step)
