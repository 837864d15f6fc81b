"""Fills from packed elements: views in elements become strided boxes of packs. Pure; no torch."""

from __future__ import annotations

from msgspec.structs import replace

from sluice._errors import UnsupportedError
from sluice.records import Entry, Fill
from sluice.records.geometry import collapse

__all__ = ["packed_fill"]


def packed_fill(piece: Entry, first: int, stride: tuple[int, ...], file: int, offset: int) -> Fill:
    """Return the fill from a view of packed elements, which are read and decoded in whole packs.

    Args:
        piece: A view of one storage.
        first: Position of its element 0 in the target, in elements.
        stride: Its steps in the target, in elements.
        file: Position of the file in the plan.
        offset: First byte of the storage in the file.

    Raises:
        UnsupportedError: It takes parts of packs.
    """
    packing = piece.elements.packing
    assert packing is not None
    shape, source, target = collapse(piece.shape, piece.stride, stride)
    size = packing.elements
    run = next((dim for dim, step in enumerate(source) if step == 1), None)
    others = [dim for dim in range(len(shape)) if dim != run]
    if run is None or shape[run] % size or piece.storage_offset % size or any(source[dim] % size for dim in others):
        raise UnsupportedError(
            f"this selection takes parts of packs of {size} elements ({packing.name})",
            advice="Read whole rows and select from the result, or convert the file first, without rules.",
        )
    return Fill(
        file=file,
        offset=offset + piece.storage_offset // size * packing.nbytes,
        elements=replace(piece.elements, packing=replace(packing, target_step=target[run])),
        shape=(*(shape[dim] for dim in others), shape[run] // size),
        source_stride=(*(source[dim] // size for dim in others), 1),
        target_stride=(*(target[dim] for dim in others), target[run] * size),
        target_start=first,
    )
