"""The region of a sharded tensor that one rank holds, and its elements as an entry of a checkpoint.

A tensor is divided over a mesh of ranks by one placement for each dimension of the mesh, as
``torch.distributed.tensor.DTensor`` describes it. Three placements leave a rank with elements of its own:

- Replicated (None here): every rank along the mesh dimension holds the same elements.
- ``Shard(dim)``: the dimension is cut as ``torch.chunk`` cuts it: pieces of ``ceil(size / ranks)``; the last ranks may
  get a smaller piece or none.
- ``_StridedShard(dim, split_factor)``: the dimension is cut into ``split_factor`` pieces, each piece is cut over the
  ranks, and a rank holds its part of every piece.

Placements apply from the first mesh dimension to the last, each to what the ones before it left, with one exception:
fully_shard of a tensor-parallel parameter writes ``_StridedShard`` to say that later mesh dimensions divided the
dimension before it. If the sizes of the later mesh dimensions that shard the same dimension multiply to
``split_factor``, they are applied first. Both orders give the same region if the sizes are even; if they are not, only
this one describes the memory that the ranks hold.

The region of a rank is in general several intervals, so that an offset and a shape cannot describe it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from msgspec import Struct

from sluice.entries.assembly import join, narrow
from sluice.records import Entry

__all__ = ["Region", "Sharding", "Split", "region_of", "select_region", "shape_of"]

#: For each dimension of a tensor ascending intervals ``(start, stop)`` of indices that are not empty; no interval where
#: a rank holds nothing.
Region = tuple[tuple[tuple[int, int], ...], ...]


class Split(Struct, frozen=True, kw_only=True):
    """A placement that divides one dimension of a tensor over the ranks along one mesh dimension."""

    #: Dimension of the tensor, from 0.
    dim: int
    #: Pieces into which the dimension is cut first; 1 for ``Shard``, ``split_factor`` for ``_StridedShard``.
    pieces: int = 1


class Sharding(Struct, frozen=True, kw_only=True):
    """How a tensor is divided over a mesh, seen from one rank. The tuples have one element for each mesh dimension."""

    #: Ranks along each mesh dimension.
    mesh: tuple[int, ...]
    #: Position of the rank in the mesh; None if the rank is not part of it.
    coordinate: tuple[int, ...] | None
    #: Placements; None where the ranks along the mesh dimension hold the same elements.
    placements: tuple[Split | None, ...]


def region_of(shape: Sequence[int], sharding: Sharding) -> Region:
    """Return the region of a tensor that the rank holds.

    Args:
        shape: Shape of the whole tensor.
        sharding: How it is divided. A rank that is not part of the mesh holds nothing.

    Raises:
        ValueError: A placement divides a dimension that the tensor lacks.
    """
    if sharding.coordinate is None:
        return tuple(() for _ in shape)
    held: list[tuple[tuple[int, int], ...]] = [((0, size),) if size else () for size in shape]
    for axis in _order(sharding):
        split = sharding.placements[axis]
        if split is not None:
            if split.dim >= len(shape):
                raise ValueError(f"{split} does not divide a tensor of {len(shape)} dimensions")
            ranks, rank = sharding.mesh[axis], sharding.coordinate[axis]
            pieces = 1 if _comes_last(axis, sharding) else split.pieces
            held[split.dim] = _part(held[split.dim], pieces, ranks, rank)
    return tuple(held)


def shape_of(region: Region) -> tuple[int, ...]:
    """Return the shape of the tensor that holds the elements of a region."""
    return tuple(sum(stop - start for start, stop in intervals) for intervals in region)


def select_region(entry: Entry, region: Region) -> Entry:
    """Return the entry that holds the positions of every interval, in their order.

    It equals ``tensor[numpy.ix_(positions of dimension 0, positions of dimension 1, ...)]``. Only the bytes of these
    positions are read.

    Args:
        entry: The whole tensor.
        region: A region of a tensor of this shape.

    Raises:
        UnsupportedError: The tensor is sparse or quantized.
    """
    for dim, intervals in enumerate(region):
        held = [(start, stop) for start, stop in intervals if start < stop] or [(0, 0)]
        parts = [narrow(entry, dim, start, stop - start) for start, stop in held]
        entry = parts[0] if len(parts) == 1 else join(parts, dim)
    return entry


def _order(sharding: Sharding) -> list[int]:
    """Return the mesh dimensions in the order in which they divide the tensor."""
    axes = range(len(sharding.mesh))
    last = [axis for axis in axes if _comes_last(axis, sharding)]
    # Of several that come after the dimensions to their right, the rightmost divides first.
    return [axis for axis in axes if axis not in last] + last[::-1]


def _comes_last(axis: int, sharding: Sharding) -> bool:
    """Return whether the placement divides what the later mesh dimensions left, as fully_shard describes it."""
    split = sharding.placements[axis]
    if split is None or split.pieces == 1:
        return False
    later = (
        size
        for size, other in zip(sharding.mesh[axis + 1 :], sharding.placements[axis + 1 :], strict=True)
        if other is not None and other.dim == split.dim
    )
    return prod(later) == split.pieces


def _part(intervals: tuple[tuple[int, int], ...], pieces: int, ranks: int, rank: int) -> tuple[tuple[int, int], ...]:
    """Return what one rank holds of intervals that are cut into pieces, and each piece over the ranks."""
    total = sum(stop - start for start, stop in intervals)
    held: list[tuple[int, int]] = []
    for piece in range(pieces):
        start, stop = _chunk(total, pieces, piece)
        first, last = _chunk(stop - start, ranks, rank)
        held += _positions(intervals, start + first, start + last)
    return _joined(held)


def _chunk(size: int, chunks: int, index: int) -> tuple[int, int]:
    """Return where one chunk starts and stops, as ``torch.chunk`` cuts; the last ones may be empty."""
    step = -(-size // chunks)
    return min(index * step, size), min((index + 1) * step, size)


def _positions(intervals: Sequence[tuple[int, int]], start: int, stop: int) -> list[tuple[int, int]]:
    """Return the intervals of the elements that are at positions ``start`` to ``stop`` within some intervals."""
    found: list[tuple[int, int]] = []
    passed = 0
    for low, high in intervals:
        first, last = max(start - passed, 0), min(stop - passed, high - low)
        if first < last:
            found.append((low + first, low + last))
        passed += high - low
    return found


def _joined(intervals: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return intervals of which neighbours that touch are one."""
    joined: list[tuple[int, int]] = []
    for start, stop in intervals:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
