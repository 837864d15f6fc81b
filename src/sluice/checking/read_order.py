"""In which order the bytes of files are read so that each is read once and whoever takes some gets them in order. Pure.

Checksums and hashes take bytes in order. Most take one range of a file, in any order of ranges. A tensor in several
chunks takes several ranges, one behind the other, wherever they lie: these ranges are read in its order, together with
everything that overlaps them, and the rest of the files after that. Two tensors that want the same ranges in different
orders cannot both have them; then the second is refused.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from sluice import _options as options

__all__ = ["Schedule", "Span", "schedule"]


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A range of bytes of a file."""

    #: Position of the file.
    file: int
    #: First byte.
    first: int
    #: First byte behind it.
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        return self.end - self.first


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An order of reading."""

    #: All bytes of the files, each once. What one wish has in one of them it has there in order.
    spans: tuple[Span, ...]
    #: Positions of wishes that do not get their bytes in order.
    refused: frozenset[int]


def schedule(extents: Sequence[tuple[int, int]], wishes: Sequence[Sequence[Span]]) -> Schedule:
    """Return the order in which files are read.

    Args:
        extents: The bytes of each file that are read: the first, and the first behind them.
        wishes: What each taker wants, in its order; inside of the extents, and without empty spans.
    """
    blocks = _blocks(wishes)
    order: dict[int, int] = {}
    refused = []
    for number, spans in enumerate(wishes):
        path = _path(blocks, spans)
        if not _fits(path, spans, order):
            refused.append(number)
        elif len(spans) > 1:
            for block in path:
                order.setdefault(block, len(order))
    early = [blocks[number] for number in order]
    return Schedule(spans=(*early, *_rest(extents, sorted(early))), refused=frozenset(refused))


def _blocks(wishes: Sequence[Sequence[Span]]) -> list[Span]:
    """Return what is read as a whole: spans that overlap are one. A small gap is read with what follows it."""
    blocks: list[Span] = []
    for span in sorted(span for spans in wishes for span in spans):
        last = blocks[-1] if blocks else None
        if last is not None and last.file == span.file and span.first < last.end:
            blocks[-1] = Span(last.file, last.first, max(last.end, span.end))
            continue
        near = last is not None and last.file == span.file and span.first - last.end <= options.COALESCE_GAP_BYTES
        blocks.append(Span(span.file, last.end if last is not None and near else span.first, span.end))
    return blocks


def _path(blocks: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Return the position of the block that each span lies in."""
    return [bisect_right(blocks, (span.file, span.first), key=lambda one: (one.file, one.first)) - 1 for span in spans]


def _fits(path: Sequence[int], spans: Sequence[Span], order: dict[int, int]) -> bool:
    """Return whether blocks can be read such that the spans come in order, after those that have a place already."""
    for (block, span), (following, behind) in pairwise(zip(path, spans, strict=True)):
        if block == following and behind.first < span.end:
            return False
    steps = [block for position, block in enumerate(path) if not position or path[position - 1] != block]
    places = [order.get(block, len(order)) for block in steps]
    return len(set(steps)) == len(steps) and places == sorted(places)


def _rest(extents: Sequence[tuple[int, int]], early: Sequence[Span]) -> Iterator[Span]:
    """Yield what is left of the files."""
    for file, (begin, end) in enumerate(extents):
        left = begin
        low = bisect_left(early, file, key=attrgetter("file"))
        high = bisect_right(early, file, key=attrgetter("file"))
        for block in early[low:high]:
            if left < block.first:
                yield Span(file, left, block.first)
            left = max(left, block.end)
        if left < end:
            yield Span(file, left, end)
