"""Arithmetic of torch's CUDA caching allocator: the bytes that it reserves for a list of allocations.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp`` (torch 2.6 to 2.13), without expandable segments:

- a request is rounded up to 512 bytes;
- requests up to 1 MiB share segments of 2 MiB;
- larger ones take the smallest free range that fits, else a new segment: of 20 MiB if they are below 10 MiB, and of
  their own size, rounded up to 2 MiB, from there on;
- the rest of a segment stays usable, unless at most 1 MiB of a segment for larger requests is left.

Separate allocations therefore reserve more than the tensors: 10 % more for many tensors of 3 MiB. A single allocation
of the total size, freed at once, leaves a cached block from which these tensors are then allocated without this loss.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from functools import cache

from sluice.records import Reservation
from sluice.records.geometry import round_up

__all__ = ["plan_reservation", "scratch_bytes"]

_MIB = 1 << 20
_SMALLEST_BYTES = 512
_LARGEST_SMALL_BYTES = _MIB
_SMALL_SEGMENT_BYTES = 2 * _MIB
_MEDIUM_SEGMENT_BYTES = 20 * _MIB
_LARGEST_MEDIUM_BYTES = 10 * _MIB
_SEGMENT_MULTIPLE_BYTES = 2 * _MIB


def plan_reservation(sizes: Iterable[int], *, one_block: bool = True) -> Reservation:
    """Return the best allocation of tensors of these sizes.

    Args:
        sizes: Bytes of each tensor; zeros take nothing.
        one_block: Whether a single block may be allocated first. It must not if tensors replace live ones, because the
            block would take as much memory as all of them together.
    """
    requested = [size for size in sizes if size]
    rounded = [round_up(size, _SMALLEST_BYTES) for size in requested]
    small = [size for size in rounded if size <= _LARGEST_SMALL_BYTES]
    large = [size for size in rounded if size > _LARGEST_SMALL_BYTES]
    small_bytes = _packed(small, small=True)
    # Below 10 MiB the allocator would take a segment of 20 MiB; from 10 MiB on it takes the size of the block.
    block = round_up(max(sum(large), _LARGEST_MEDIUM_BYTES), _SEGMENT_MULTIPLE_BYTES) if large and one_block else 0
    return Reservation(
        requested_bytes=sum(requested),
        allocated_bytes=sum(rounded),
        block_bytes=block,
        reserved_bytes=small_bytes + (block or _packed(large, small=False)),
    )


@cache
def scratch_bytes(buffer_bytes: int) -> int:
    """Return the size of a scratch that holds one staging buffer and fills a segment of its own, in bytes."""
    return round_up(max(buffer_bytes, _LARGEST_MEDIUM_BYTES), _SEGMENT_MULTIPLE_BYTES)


def _packed(sizes: Iterable[int], *, small: bool) -> int:
    """Return the bytes of the segments for allocations in sequence, each in the smallest free range that fits.

    Args:
        sizes: Bytes of each allocation, in order.
        small: Whether all are small; of a segment for larger ones a small rest is not used again.
    """
    rests: list[int] = []  # sorted
    reserved = 0
    for size in sizes:
        position = bisect_left(rests, size)
        if position == len(rests):
            segment = _SMALL_SEGMENT_BYTES if small else _MEDIUM_SEGMENT_BYTES
            if size >= _LARGEST_MEDIUM_BYTES:
                segment = round_up(size, _SEGMENT_MULTIPLE_BYTES)
            reserved += segment
            rest = segment - size
        else:
            rest = rests.pop(position) - size
        if rest > (0 if small else _LARGEST_SMALL_BYTES):
            insort(rests, rest)
    return reserved
