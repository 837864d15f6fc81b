"""Parts of tensors that are several intervals in each dimension: what one rank holds of a sharded tensor."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.entries.assembly import join, narrow
from sluice.records import Entry

__all__ = ["select_region"]


def select_region(entry: Entry, region: Sequence[Sequence[tuple[int, int]]]) -> Entry:
    """Return the entry that holds the positions of every interval, in their order.

    It equals ``tensor[numpy.ix_(positions of dimension 0, positions of dimension 1, ...)]``. Only the bytes of these
    positions are read.

    Args:
        entry: The whole tensor.
        region: For each dimension ascending intervals ``(start, stop)``, as indices; they may be empty.

    Raises:
        UnsupportedError: The tensor is sparse or quantized.
        ValueError: The intervals overlap, leave the tensor, or are not one list per dimension.
    """
    if len(region) != len(entry.shape):
        raise ValueError(f"{len(region)} lists of intervals for a tensor of {len(entry.shape)} dimensions")
    for dim, intervals in enumerate(region):
        end = 0
        for start, stop in intervals:
            if not end <= start <= stop <= entry.shape[dim]:
                raise ValueError(
                    f"interval ({start}, {stop}) leaves dimension {dim} of {entry.shape[dim]} positions, "
                    "or overlaps another interval"
                )
            end = stop
        held = [(start, stop) for start, stop in intervals if start < stop] or [(0, 0)]
        parts = [narrow(entry, dim, start, stop - start) for start, stop in held]
        entry = parts[0] if len(parts) == 1 else join(parts, dim)
    return entry
