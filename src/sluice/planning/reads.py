"""Read planning: ranges of files, the method of each read, and the copies out of staging.

Three rules decide how a byte is read. A cached range is read buffered, any other directly. Bytes with one destination,
to which they go unchanged, are read straight into it; all others go through staging. Small ranges are read together
with their neighbors.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter

from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._options import PageCache
from sluice.records import AccessFacts, Copy, Elements, FileFacts, Fill, Method, Read, Target
from sluice.records.geometry import CopyPiece, collapse, cut, span_elements, split_evenly

__all__ = [
    "CollapsedFill",
    "cached_share",
    "collapse_fill",
    "is_cached",
    "is_verbatim",
    "join_requests",
    "read_in_place",
    "shared_ids",
    "staged_reads",
]

#: File systems whose files are in memory: they answer no probe, and their reads are copies.
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "memory"})


class CollapsedFill(Struct, frozen=True, gc=False):
    """A fill as an equivalent copy with the fewest dimensions."""

    #: Position of the target in ``LoadPlan.targets``.
    target: int
    #: The original fill.
    fill: Fill
    #: The whole collapsed copy; its ``start_byte`` is an offset in the file.
    piece: CopyPiece
    #: Bytes of one stored element, or of one pack.
    item_bytes: int
    #: Whether its elements are contiguous in the file and in the target.
    contiguous: bool

    @property
    def end(self) -> int:
        """First byte in the file after it."""
        return self.piece.start_byte + self.piece.nbytes


#: A fill, and one of the pieces into which it is cut.
_FillPiece = tuple[CollapsedFill, CopyPiece]


def collapse_fill(position: int, fill: Fill) -> CollapsedFill:
    """Return a fill of the target at ``position``, collapsed."""
    whole, item_bytes, contiguous = _collapsed(fill.elements, fill.shape, fill.source_stride, fill.target_stride)
    return CollapsedFill(position, fill, CopyPiece(fill.offset, *whole, fill.target_start), item_bytes, contiguous)


@lru_cache(maxsize=256)
def _collapsed(
    elements: Elements, shape: tuple[int, ...], source_stride: tuple[int, ...], target_stride: tuple[int, ...]
) -> tuple[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]], int, bool]:
    """Return what fills of one kind have in common, as the same objects: most models have few shapes."""
    shape, source, target = collapse(shape, source_stride, target_stride)
    contiguous = elements.packing is None and len(shape) == 1 and source == target == (1,)
    return (span_elements(shape, source) * elements.item_bytes, shape, source, target), elements.item_bytes, contiguous


def shared_ids(fills: Iterable[CollapsedFill]) -> set[int]:
    """Return the ids of fills that share source bytes with another fill: they are read once, through staging."""
    shared: set[int] = set()
    furthest: CollapsedFill | None = None
    for fill in sorted(fills, key=lambda fill: (fill.fill.file, fill.piece.start_byte)):
        if furthest is not None and furthest.fill.file == fill.fill.file and fill.piece.start_byte < furthest.end:
            shared.update((id(furthest), id(fill)))
        if furthest is None or furthest.fill.file != fill.fill.file or fill.end > furthest.end:
            furthest = fill
    return shared


def is_verbatim(target: Target, collapsed: CollapsedFill) -> bool:
    """Return whether the bytes of a target equal the stored bytes of its only fill."""
    alone = len(target.fills) == 1 and collapsed.fill.target_start == 0 and not target.constants
    return alone and collapsed.contiguous and target.dtype == collapsed.fill.dtype and collapsed.fill.elements.verbatim


def read_in_place(
    collapsed: CollapsedFill, target: Target, facts: FileFacts, page_cache: PageCache
) -> tuple[int, list[Read]] | None:
    """Return the reads that fill a target without staging, or None if staging is faster.

    Direct reads need an address that is congruent with the file offset. A new mapping can be placed accordingly;
    existing memory cannot, nor can a tensor whose file offset is not a multiple of its item size.

    Returns:
        Bytes to leave before the target in its mapping, and the reads.
    """
    start = collapsed.piece.start_byte
    ranges = list(
        split_evenly(
            start, collapsed.piece.nbytes, limit_bytes=facts.access.request_bytes, align_bytes=defaults.BLOCK_BYTES
        )
    )
    methods = [_permitted_methods(facts, offset, nbytes, page_cache) for offset, nbytes in ranges]
    direct = any(permitted[0] == "direct" for permitted in methods)
    if direct and (target.existing or start % ITEM_BYTES[target.dtype]):
        return None
    reads = [
        Read(
            file=collapsed.fill.file,
            offset=offset,
            nbytes=nbytes,
            methods=permitted,
            targets=(collapsed.target,),
            into=collapsed.target,
            into_offset=offset - start,
        )
        for (offset, nbytes), permitted in zip(ranges, methods, strict=True)
    ]
    return (start % defaults.BLOCK_BYTES if direct else 0), reads


def _permitted_methods(facts: FileFacts, offset: int, nbytes: int, page_cache: PageCache) -> tuple[Method, ...]:
    """Return the permitted methods for a range of a file, in order of preference."""
    if not facts.direct_io or page_cache == "keep":
        return ("buffered",)
    if page_cache == "bypass":
        return ("direct", "buffered")
    # Without probes the cache state is unknown: read buffered.
    return ("buffered",) if not facts.cached or is_cached(facts, offset, nbytes) else ("direct", "buffered")


def is_cached(facts: FileFacts, offset: int, nbytes: int) -> bool:
    """Return whether the cached share of a range is large enough to read it through the page cache."""
    return cached_share(facts, offset, nbytes) >= defaults.CACHED_SHARE


def cached_share(facts: FileFacts, offset: int, nbytes: int) -> float:
    """Return the cached share of a range, from 0 to 1: 1 if the file system is in memory, 0 if it is unknown."""
    if facts.filesystem in _MEMORY_FILESYSTEMS:
        return 1.0
    step, end = facts.probe_step_bytes, offset + nbytes
    first = offset // step
    shares = facts.cached[first : (end - 1) // step + 1]
    if len(shares) == 1:
        return shares[0]
    cached = sum(share * (min(end, (i + 1) * step) - max(offset, i * step)) for i, share in enumerate(shares, first))
    return cached / nbytes


def staged_reads(
    fills: Iterable[CollapsedFill], facts: Sequence[FileFacts], *, buffer_bytes: int, page_cache: PageCache
) -> Iterator[Read]:
    """Yield the reads of fills that go through staging, in file order, with neighboring pieces in one read.

    A buffer holds the read, and up to a block of alignment at each end. Big-endian pieces are read alone.

    Args:
        fills: The fills.
        facts: Facts of all files of the plan.
        buffer_bytes: Bytes of one staging buffer.
        page_cache: Use of the page cache.
    """
    room = buffer_bytes - 2 * defaults.BLOCK_BYTES
    pieces = [
        (fill.fill.file, piece.start_byte, fill, piece)
        for fill in fills
        for piece in _pieces(fill, facts[fill.fill.file].access, room)
    ]
    pieces.sort(key=itemgetter(0, 1))
    pending: list[_FillPiece] = []
    file, start, end, swaps = -1, 0, 0, 0
    for number, first, fill, piece in pieces:
        access, swap_bytes = facts[number].access, fill.fill.elements.swap_bytes
        piece_end = first + piece.nbytes
        fits = (
            file == number
            and first - end <= access.gap_bytes
            and max(end, piece_end) - start <= min(room, access.request_bytes)
            and not (swaps or swap_bytes)
        )
        if not fits:
            if pending:
                yield _join(pending, start, end, facts[file], page_cache)
            pending, file, start, end, swaps = [], number, first, 0, swap_bytes
        pending.append((fill, piece))
        end = max(end, piece_end)
    if pending:
        yield _join(pending, start, end, facts[file], page_cache)


def _pieces(fill: CollapsedFill, access: AccessFacts, room: int) -> Iterable[CopyPiece]:
    """Return the pieces of a fill that fit one read."""
    whole, item, limit = fill.piece, fill.item_bytes, min(room, access.request_bytes)
    if fill.contiguous and whole.start_byte + whole.nbytes <= limit - item:  # before the first cut
        return (whole,)
    return cut(whole, item, limit_bytes=limit, gap_bytes=access.gap_bytes)


def _join(pieces: list[_FillPiece], start: int, end: int, facts: FileFacts, page_cache: PageCache) -> Read:
    """Return one read of the bytes from ``start`` to ``end`` of a file, with a copy for each piece."""
    fill = pieces[0][0].fill
    copies = [
        Copy(
            target=collapsed.target,
            offset=piece.start_byte - start,
            # Numbers that are swapped are alone in their read, and swapped before the copy.
            elements=replace(fill.elements, swap_bytes=0) if fill.elements.swap_bytes else collapsed.fill.elements,
            shape=piece.shape,
            source_stride=piece.source_stride,
            target_stride=piece.target_stride,
            target_start=piece.target_start,
        )
        for collapsed, piece in pieces
    ]
    return Read(
        file=fill.file,
        offset=start,
        nbytes=end - start,
        methods=_permitted_methods(facts, start, end - start, page_cache),
        targets=tuple(dict.fromkeys([copy.target for copy in copies])),
        copies=tuple(copies),
        swap_bytes=fill.elements.swap_bytes,
    )


def join_requests(reads: Iterable[Read], files: Sequence[FileFacts]) -> Iterator[Read]:
    """Yield the reads, and mark those that continue the request of the read before them.

    A read is as large as a tensor or a staging buffer, which is less than what suits a server: at a latency of 50 ms,
    the 16 requests for 2 MiB at a time bring 0.6 GB/s. So a reader keeps the answer of one request open for several
    reads. A request is at most ``AccessFacts.request_bytes`` long, and has gaps of at most ``AccessFacts.gap_bytes``.

    Args:
        reads: Reads in file order.
        files: Facts of all files.
    """
    file = first = end = -1
    for read in reads:
        access, stop = files[read.file].access, read.offset + read.nbytes
        continues = (
            access.joins_reads
            and read.file == file
            and 0 <= read.offset - end <= access.gap_bytes
            and stop - first <= access.request_bytes
        )
        yield replace(read, continues=True) if continues else read
        if not continues:
            file, first = read.file, read.offset
        end = stop
