"""Which ranges are read, by which method, and where their bytes go first. Pure; no I/O, no torch.

How a byte is read follows from three questions. Is it cached? Then buffered, otherwise direct. Does it go to one
place, unchanged? Then straight to it, otherwise through staging. Is it small? Then its neighbours come along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES
from sluice._geometry import Piece, collapse, cut, cut_rows, round_down, round_up, span_elements, split_evenly
from sluice._options import PageCache
from sluice.records import AccessFacts, Copy, FileFacts, Fill, Method, Read, Swap, Target

__all__ = [
    "Run",
    "StagedReads",
    "as_run",
    "collapse_fills",
    "is_cached",
    "is_verbatim",
    "overlapped",
    "read_in_place",
    "takes_bytes",
]

#: Bytes of a number that is turned round and where such numbers begin, in bytes modulo that; zeros for bytes that stay.
_Grid = tuple[int, int]

#: File systems whose files are memory: they answer no probe, and their reads are copies.
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs", "memory"})


@dataclass(frozen=True, slots=True)
class Run:
    """A fill, collapsed: where its source bytes begin and what it looks like with the fewest dimensions."""

    target: int
    fill: Fill
    piece: Piece

    @property
    def contiguous(self) -> bool:
        """Whether it is one run of bytes on both sides."""
        piece = self.piece
        return (
            self.fill.elements.kernel is None
            and len(piece.shape) == 1
            and piece.source_stride == (1,)
            and piece.target_stride == (1,)
        )

    @property
    def end(self) -> int:
        """First byte of the file behind it."""
        return self.piece.start_byte + self.piece.nbytes


def collapse_fills(targets: Sequence[Target]) -> list[Run]:
    """Return every fill of the targets as a run."""
    return [as_run(position, fill) for position, target in enumerate(targets) for fill in target.fills]


def as_run(position: int, fill: Fill) -> Run:
    """Return a fill of the target at ``position`` as a run."""
    shape, source, target = fill.shape, fill.source_stride, fill.target_stride
    if fill.elements.kernel is None:
        shape, source, target = collapse(shape, source, target)
    nbytes = span_elements(shape, source) * ITEM_BYTES[fill.dtype]
    return Run(position, fill, Piece(fill.offset, nbytes, shape, source, target, fill.target_start))


def overlapped(runs: Iterable[Run]) -> set[int]:
    """Return the ids of runs whose source bytes another run needs too: they are read once, through staging."""
    found: set[int] = set()
    furthest: Run | None = None
    for run in sorted(runs, key=lambda run: (run.fill.file, run.piece.start_byte)):
        if furthest is not None and furthest.fill.file == run.fill.file and run.piece.start_byte < furthest.end:
            found.update((id(furthest), id(run)))
        if furthest is None or furthest.fill.file != run.fill.file or run.end > furthest.end:
            furthest = run
    return found


def is_verbatim(target: Target, run: Run) -> bool:
    """Return whether a target is the run's bytes as they are in the file."""
    alone = len(target.fills) == 1 and run.fill.target_start == 0 and not target.constants
    return alone and run.contiguous and target.dtype == run.fill.dtype and run.fill.elements.verbatim


def takes_bytes(target: Target, run: Run) -> bool:
    """Return whether a target can receive the run's bytes as they are in the file, without staging."""
    return is_verbatim(target, run) and target.device == "cpu" and target.nbytes >= options.OWN_MAPPING_BYTES


def read_in_place(run: Run, target: Target, facts: FileFacts, page_cache: PageCache) -> tuple[int, list[Read]] | None:
    """Return the lead and the reads that fill a target without staging, or None where staging is faster.

    Direct reads need an address congruent with the file offset. A fresh mapping is placed so; memory that exists is
    not, and an offset that no element may start at cannot be.
    """
    start = run.piece.start_byte
    ranges = list(
        split_evenly(start, run.piece.nbytes, limit_bytes=facts.access.request_bytes, align_bytes=options.BLOCK_BYTES)
    )
    methods = [methods_for(facts, offset, nbytes, page_cache) for offset, nbytes in ranges]
    direct = any(choice[0] == "direct" for choice in methods)
    if direct and (target.existing or start % ITEM_BYTES[target.dtype]):
        return None
    reads = [
        Read(
            file=run.fill.file,
            offset=offset,
            nbytes=nbytes,
            methods=choice,
            into=run.target,
            into_offset=offset - start,
        )
        for (offset, nbytes), choice in zip(ranges, methods, strict=True)
    ]
    return (start % options.BLOCK_BYTES if direct else 0), reads


def methods_for(facts: FileFacts, offset: int, nbytes: int, page_cache: PageCache) -> tuple[Method, ...]:
    """Return the permitted methods for a range of a file, the preferred first."""
    if not facts.direct_io or page_cache == "keep":
        return ("buffered",)
    if page_cache == "bypass":
        return ("direct", "buffered")
    # A file system that does not tell what is cached wants buffered reads.
    return ("buffered",) if not facts.cached or is_cached(facts, offset, nbytes) else ("direct", "buffered")


def is_cached(facts: FileFacts, offset: int, nbytes: int) -> bool:
    """Return whether a range is in memory already, as far as the probes tell."""
    step = facts.probe_step_bytes
    probes = facts.cached[offset // step : (offset + nbytes - 1) // step + 1]
    return any(probes) or facts.filesystem in _MEMORY_FILESYSTEMS


class StagedReads:
    """Collects the runs that go through staging and joins their pieces into reads that fit one buffer.

    A buffer holds the read, up to a block of alignment at each end, and behind that what was cast on the host.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        facts: Sequence[FileFacts],
        *,
        buffer_bytes: int,
        page_cache: PageCache,
        host_casts: bool,
    ) -> None:
        """Begin with no runs.

        Args:
            targets: All targets of the plan.
            facts: Facts of its files.
            buffer_bytes: Bytes of one staging buffer.
            page_cache: How the page cache is used.
            host_casts: Whether what an accelerator gets in a narrower dtype is cast before it is sent.
        """
        self._targets = targets
        self._facts = facts
        self._page_cache = page_cache
        self._host_casts = host_casts
        self._buffer_bytes = buffer_bytes
        room = buffer_bytes - 2 * options.BLOCK_BYTES
        # A narrower dtype takes at most half the bytes: two thirds for the read, one third for the result.
        self._limit_bytes = round_down(room * 2 // 3, options.BLOCK_BYTES) if host_casts else room
        self._pieces: list[tuple[Run, Piece]] = []

    def add(self, run: Run) -> None:
        """Add a run."""
        item = ITEM_BYTES[run.fill.dtype]
        access = self._facts[run.fill.file].access
        most = self._most_bytes(access)
        if run.fill.elements.kernel is not None:
            pieces = cut_rows(run.piece, item, limit_bytes=most)
        else:
            pieces = cut(run.piece, item, limit_bytes=most, gap_bytes=access.gap_bytes)
        self._pieces.extend((run, piece) for piece in pieces)

    def reads(self) -> Iterator[Read]:
        """Yield the reads in file order; neighbouring pieces come in one."""
        pending: list[tuple[Run, Piece]] = []
        grids: dict[_Grid, int] = {}
        start = end = 0
        for run, piece in sorted(self._pieces, key=lambda item: (item[0].fill.file, item[1].start_byte)):
            piece_end = piece.start_byte + piece.nbytes
            fits = (
                pending
                and pending[0][0].fill.file == run.fill.file
                and piece.start_byte - end <= (access := self._facts[run.fill.file].access).gap_bytes
                and max(end, piece_end) - start <= self._most_bytes(access)
                and not self._clashes(grids, run, piece)
            )
            if pending and not fits:
                yield self._join(pending, start, end)
                pending, grids = [], {}
            if not pending:
                start, end = piece.start_byte, piece_end
            pending.append((run, piece))
            end = max(end, piece_end)
            grid = self._grid(run, piece)
            if grid is not None:
                grids[grid] = max(piece_end, grids.get(grid, 0))
        if pending:
            yield self._join(pending, start, end)

    def _most_bytes(self, access: AccessFacts) -> int:
        return min(self._limit_bytes, access.request_bytes)

    def _grid(self, run: Run, piece: Piece) -> _Grid | None:
        """Return how the numbers that a piece wants lie in the file; None where copies before the swaps can serve it.

        A copy to an accelerator may still read the buffer when it returns, so that no swap may follow it.
        """
        item = run.fill.elements.swap_bytes
        if item:
            return item, piece.start_byte % item
        return None if self._targets[run.target].device == "cpu" else (0, 0)

    def _clashes(self, grids: Mapping[_Grid, int], run: Run, piece: Piece) -> bool:
        """Return whether a piece wants bytes otherwise than a piece before it that is in the same buffer.

        Args:
            grids: Where the last piece of each kind ends.
            run: Of the piece.
            piece: What follows in the file.
        """
        own = self._grid(run, piece)
        return own is not None and any(piece.start_byte < end for grid, end in grids.items() if grid != own)

    def _join(self, pending: list[tuple[Run, Piece]], start: int, end: int) -> Read:
        file = pending[0][0].fill.file
        swaps = tuple(_swaps(pending, start))
        early, late = _in_order(pending, swaps, start)
        copies = []
        free = round_up(end - start, options.BLOCK_BYTES) + 2 * options.BLOCK_BYTES
        for run, piece in (*early, *late):
            cast_at = None
            if self._host_casts and self._narrows(run):
                cast_bytes = (
                    span_elements(piece.shape, piece.source_stride) * ITEM_BYTES[self._targets[run.target].dtype]
                )
                if free + cast_bytes <= self._buffer_bytes:
                    cast_at = free
                    free = round_up(free + cast_bytes, options.TENSOR_ALIGNMENT_BYTES)
            copies.append(
                Copy(
                    target=run.target,
                    offset=piece.start_byte - start,
                    elements=run.fill.elements.native(),
                    shape=piece.shape,
                    source_stride=piece.source_stride,
                    target_stride=piece.target_stride,
                    target_start=piece.target_start,
                    cast_at=cast_at,
                    first_row=_first_row(run, piece),
                )
            )
        methods = methods_for(self._facts[file], start, end - start, self._page_cache)
        return Read(
            file=file,
            offset=start,
            nbytes=end - start,
            methods=methods,
            copies=tuple(copies),
            swaps=swaps,
            copies_before_swaps=len(early),
        )

    def _narrows(self, run: Run) -> bool:
        target = self._targets[run.target]
        return target.device != "cpu" and run.contiguous and ITEM_BYTES[target.dtype] < ITEM_BYTES[run.fill.dtype]


def _first_row(run: Run, piece: Piece) -> int:
    """Return the position of a piece's first row in its tensor; 0 without a row kernel."""
    kernel = run.fill.elements.kernel
    return 0 if kernel is None else piece.target_start // max(1, piece.target_stride[0])


def _in_order(
    pieces: Sequence[tuple[Run, Piece]], swaps: Sequence[Swap], start: int
) -> tuple[list[tuple[Run, Piece]], list[tuple[Run, Piece]]]:
    """Divide the pieces of a read into those that are copied before its swaps, and the rest.

    Before come the pieces that want bytes as they are and that share them with what is turned round: swaps are done
    where the bytes lie.
    """
    early: list[tuple[Run, Piece]] = []
    late: list[tuple[Run, Piece]] = []
    for run, piece in pieces:
        first = piece.start_byte - start
        shared = not run.fill.elements.swap_bytes and any(
            swap.offset < first + piece.nbytes and first < swap.offset + swap.nbytes for swap in swaps
        )
        (early if shared else late).append((run, piece))
    return early, late


def _swaps(pieces: Iterable[tuple[Run, Piece]], start: int) -> Iterator[Swap]:
    """Yield the ranges of a read whose bytes are turned round; each once, however many pieces need it.

    Args:
        pieces: What the read is for, in file order. Pieces that overlap are views of one storage.
        start: First byte of the read.
    """
    last: Swap | None = None
    for run, piece in pieces:
        if not run.fill.elements.swap_bytes:
            continue
        first, end = piece.start_byte - start, piece.start_byte - start + piece.nbytes
        if last is not None and first < last.offset + last.nbytes:
            last = replace(last, nbytes=max(last.nbytes, end - last.offset))
            continue
        if last is not None:
            yield last
        last = Swap(offset=first, nbytes=end - first, item_bytes=run.fill.elements.swap_bytes)
    if last is not None:
        yield last
