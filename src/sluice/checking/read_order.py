"""Read order: every byte of the files once, and in order for each stream. Pure.

Checksums and hashes consume bytes in order. Most streams are a single range, which can be read at any time. A tensor in
several chunks is a stream of several ranges, anywhere in the files: these are read first, in the order of the stream
and with every range that overlaps them, followed by the rest of the files. If two streams need the same ranges in
different orders, the second is refused.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise
from operator import attrgetter

from msgspec import Struct

__all__ = ["FileRange", "ReadOrder", "schedule"]


class FileRange(Struct, frozen=True, order=True):
    """A range of bytes of a file."""

    #: Position of the file.
    file: int
    #: First byte.
    first: int
    #: Byte after the last.
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.end - self.first


class ReadOrder(Struct, frozen=True, kw_only=True):
    """The order in which the files are read."""

    #: All bytes of the files, each once. Within a range, the bytes of a stream are in order.
    ranges: tuple[FileRange, ...]
    #: Positions of the streams whose bytes are not in order.
    refused: frozenset[int]


def schedule(
    extents: Sequence[tuple[int, int]], streams: Sequence[Sequence[FileRange]], gaps_bytes: Sequence[int]
) -> ReadOrder:
    """Return the order in which the files are read.

    Args:
        extents: The first byte of each file to read, and the byte after the last.
        streams: The ranges of each stream, in its order: inside the extents, and not empty.
        gaps_bytes: Largest gap of each file that is read with the ranges around it, in bytes.
    """
    blocks = _blocks(streams, gaps_bytes)
    order: dict[int, int] = {}
    refused = []
    for number, ranges in enumerate(streams):
        path = _path(blocks, ranges)
        if not _fits(path, ranges, order):
            refused.append(number)
        elif len(ranges) > 1:
            for block in path:
                order.setdefault(block, len(order))
    early = [blocks[number] for number in order]
    return ReadOrder(ranges=(*early, *_rest(extents, sorted(early))), refused=frozenset(refused))


def _blocks(streams: Sequence[Sequence[FileRange]], gaps_bytes: Sequence[int]) -> list[FileRange]:
    """Return the blocks that are read as a whole: overlapping ranges joined, small gaps included."""
    blocks: list[FileRange] = []
    for each in sorted(each for ranges in streams for each in ranges):
        last = blocks[-1] if blocks else None
        if last is not None and last.file == each.file and each.first < last.end:
            blocks[-1] = FileRange(last.file, last.first, max(last.end, each.end))
            continue
        near = last is not None and last.file == each.file and each.first - last.end <= gaps_bytes[each.file]
        blocks.append(FileRange(each.file, last.end if last is not None and near else each.first, each.end))
    return blocks


def _path(blocks: Sequence[FileRange], ranges: Sequence[FileRange]) -> list[int]:
    """Return the position of the block that contains each range."""
    return [
        bisect_right(blocks, (each.file, each.first), key=lambda block: (block.file, block.first)) - 1
        for each in ranges
    ]


def _fits(path: Sequence[int], ranges: Sequence[FileRange], order: dict[int, int]) -> bool:
    """Return whether the blocks of a path can be read in its order, given the order decided so far."""
    for (block, each), (next_block, successor) in pairwise(zip(path, ranges, strict=True)):
        if block == next_block and successor.first < each.end:
            return False
    steps = [block for position, block in enumerate(path) if not position or path[position - 1] != block]
    places = [order.get(block, len(order)) for block in steps]
    return len(set(steps)) == len(steps) and places == sorted(places)


def _rest(extents: Sequence[tuple[int, int]], early: Sequence[FileRange]) -> Iterator[FileRange]:
    """Yield the ranges of the files between the early blocks."""
    for file, (begin, end) in enumerate(extents):
        left = begin
        low = bisect_left(early, file, key=attrgetter("file"))
        high = bisect_right(early, file, key=attrgetter("file"))
        for block in early[low:high]:
            if left < block.first:
                yield FileRange(file, left, block.first)
            left = max(left, block.end)
        if left < end:
            yield FileRange(file, left, end)
