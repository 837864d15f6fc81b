"""From targets and facts to a plan: a pure function, no I/O, no allocation, no torch.

How a byte is read follows from three questions. Is it cached? Then buffered, otherwise direct. Does it go to one
place, unchanged? Then straight to it, otherwise through staging. Is it small? Then its neighbours come along.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES
from sluice._errors import BudgetError
from sluice._geometry import Piece, collapse, cut, round_down, round_up, span_elements, split_evenly
from sluice._layout import lay_out_blocks
from sluice._options import PageCache
from sluice._records import (
    Block,
    Copy,
    FileFacts,
    FileRecord,
    Fill,
    LoadPlan,
    MachineFacts,
    Method,
    Peaks,
    Read,
    Target,
)
from sluice._units import format_bytes

__all__ = ["check_budget", "plan_load"]

#: File systems whose files are memory: they answer no probe, and their reads are copies.
_MEMORY_FILESYSTEMS = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True)
class _Run:
    """A fill, collapsed: where its source bytes begin and what it looks like with the fewest dimensions."""

    target: int
    fill: Fill
    piece: Piece

    @property
    def contiguous(self) -> bool:
        """Whether it is one run of bytes on both sides."""
        piece = self.piece
        return len(piece.shape) == 1 and piece.source_stride == (1,) and piece.target_stride == (1,)


def plan_load(
    targets: Sequence[Target],
    files: tuple[FileRecord, ...],
    facts: MachineFacts,
    *,
    staging_bytes: int,
    page_cache: PageCache = "auto",
) -> LoadPlan:
    """Return the complete plan that fills ``targets``.

    Args:
        targets: Final memory and its fills.
        files: The files that the fills read.
        facts: What was asked of the machine, one ``FileFacts`` for each file.
        staging_bytes: The most that staging buffers may take together.
        page_cache: See ``sluice._options.PageCache``.
    """
    buffer_bytes = _staging_buffer_bytes(staging_bytes)
    runs = [_collapse(position, fill) for position, target in enumerate(targets) for fill in target.fills]
    overlapped = _overlapped(runs)
    reads: list[Read] = []
    leads: dict[int, int] = {}
    staged: list[tuple[_Run, Piece]] = []
    for run in runs:
        target = targets[run.target]
        placed = None
        if run.contiguous and _takes_bytes(target, run) and id(run) not in overlapped:
            placed = _reads_in_place(run, target, facts.files[run.fill.file], page_cache)
        if placed is None:
            limit = buffer_bytes - 2 * options.BLOCK_BYTES
            item = ITEM_BYTES[run.fill.dtype]
            pieces = cut(run.piece, item, limit_bytes=limit, gap_bytes=options.COALESCE_GAP_BYTES)
            staged.extend((run, piece) for piece in pieces)
        else:
            leads[run.target], in_place = placed
            reads.extend(in_place)
    reads.extend(_staged_reads(staged, facts.files, page_cache, buffer_bytes - 2 * options.BLOCK_BYTES))
    reads.sort(key=lambda read: (read.file, read.offset))
    blocks, arenas = lay_out_blocks(targets, leads)
    readers = _readers(reads, facts)
    buffers = min(max(1, staging_bytes // buffer_bytes), readers, sum(read.into is None for read in reads))
    return LoadPlan(
        files=files,
        facts=facts,
        targets=tuple(targets),
        blocks=blocks,
        arenas=arenas,
        reads=tuple(reads),
        readers=readers,
        staging_buffer_bytes=buffer_bytes,
        staging_buffers=buffers,
        final_bytes=sum(target.nbytes for target in targets),
        predicted=_predict(targets, blocks, arenas, buffers * buffer_bytes),
        reasons=_reasons(reads, files, facts, page_cache),
        drop_behind=page_cache == "bypass",
    )


def check_budget(plan: LoadPlan, limit_bytes: int, origin: str) -> None:
    """Raise ``BudgetError`` when the predicted growth of host memory is above ``limit_bytes``.

    Args:
        plan: The plan to judge.
        limit_bytes: What host memory may grow by.
        origin: Where the limit comes from, for the message: "MemoryLimits(host=...)", "free memory".
    """
    needed = plan.predicted.total_bytes
    if needed <= limit_bytes:
        return
    allocated = [target for target in plan.targets if target.device == "cpu" and not target.existing]
    weights = sum(target.nbytes for target in allocated)
    halved = needed - weights + sum(_half_bytes(target) for target in allocated)
    fits = f"; with a 16-bit dtype it needs {format_bytes(halved)}" if halved < needed else ""
    raise BudgetError(
        f"the load needs {format_bytes(needed)} of host memory: {format_bytes(weights)} for weights, "
        f"{format_bytes(needed - weights)} for staging and overhead{fits}",
        expected=f"at most {format_bytes(limit_bytes)} ({origin})",
        found=format_bytes(needed),
    )


def _half_bytes(target: Target) -> int:
    return target.nbytes // 2 if target.dtype == "float32" else target.nbytes


def _staging_buffer_bytes(staging_bytes: int) -> int:
    """Return the size of one buffer: an eighth of the gate, between one huge page and one full read."""
    if staging_bytes < options.SMALLEST_STAGING_BYTES:
        raise BudgetError(
            "staging is too small",
            expected=f"at least {format_bytes(options.SMALLEST_STAGING_BYTES)}",
            found=format_bytes(staging_bytes),
        )
    if staging_bytes < options.HUGE_PAGE_BYTES:
        return round_down(staging_bytes, options.BLOCK_BYTES)
    share = round_down(staging_bytes // options.WAITING_READERS, options.HUGE_PAGE_BYTES)
    return min(max(share, options.HUGE_PAGE_BYTES), options.READ_BYTES)


def _collapse(position: int, fill: Fill) -> _Run:
    shape, source, target = collapse(fill.shape, fill.source_stride, fill.target_stride)
    nbytes = span_elements(shape, source) * ITEM_BYTES[fill.dtype]
    return _Run(position, fill, Piece(fill.offset, nbytes, shape, source, target, fill.target_start))


def _overlapped(runs: Iterable[_Run]) -> set[int]:
    """Return the ids of runs whose source bytes another run needs too: they are read once, through staging."""
    found: set[int] = set()
    furthest: _Run | None = None
    for run in sorted(runs, key=lambda run: (run.fill.file, run.piece.start_byte)):
        if furthest is not None and furthest.fill.file == run.fill.file and run.piece.start_byte < _end(furthest):
            found.update((id(furthest), id(run)))
        if furthest is None or furthest.fill.file != run.fill.file or _end(run) > _end(furthest):
            furthest = run
    return found


def _end(run: _Run) -> int:
    return run.piece.start_byte + run.piece.nbytes


def _takes_bytes(target: Target, run: _Run) -> bool:
    """Return whether the target can receive the run's bytes as they are in the file."""
    return (
        target.device == "cpu"
        and len(target.fills) == 1
        and run.fill.target_start == 0
        and target.dtype == run.fill.dtype
        and target.nbytes >= options.OWN_MAPPING_BYTES
    )


def _reads_in_place(
    run: _Run, target: Target, facts: FileFacts, page_cache: PageCache
) -> tuple[int, list[Read]] | None:
    """Return the lead and the reads that fill a target without staging, or None where staging is faster.

    Direct reads need an address congruent with the file offset. A fresh mapping is placed so; memory that exists is
    not, and an offset that no element may start at cannot be.
    """
    start = run.piece.start_byte
    ranges = list(
        split_evenly(start, run.piece.nbytes, limit_bytes=options.READ_BYTES, align_bytes=options.BLOCK_BYTES)
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
    return ("buffered",) if not facts.cached or _is_cached(facts, offset, nbytes) else ("direct", "buffered")


def _is_cached(facts: FileFacts, offset: int, nbytes: int) -> bool:
    """Return whether a range is in memory already, as far as the probes tell."""
    step = facts.probe_step_bytes
    probes = facts.cached[offset // step : (offset + nbytes - 1) // step + 1]
    return any(probes) or facts.filesystem in _MEMORY_FILESYSTEMS


def _staged_reads(
    staged: list[tuple[_Run, Piece]], facts: Sequence[FileFacts], page_cache: PageCache, limit_bytes: int
) -> Iterator[Read]:
    """Join neighbouring pieces into reads of at most ``limit_bytes``."""
    staged.sort(key=lambda item: (item[0].fill.file, item[1].start_byte))
    pending: list[tuple[_Run, Piece]] = []
    start = end = 0
    for run, piece in staged:
        piece_end = piece.start_byte + piece.nbytes
        fits = (
            pending
            and pending[0][0].fill.file == run.fill.file
            and piece.start_byte - end <= options.COALESCE_GAP_BYTES
            and max(end, piece_end) - start <= limit_bytes
        )
        if pending and not fits:
            yield _join(pending, start, end, facts, page_cache)
            pending = []
        if not pending:
            start, end = piece.start_byte, piece_end
        pending.append((run, piece))
        end = max(end, piece_end)
    if pending:
        yield _join(pending, start, end, facts, page_cache)


def _join(
    pending: list[tuple[_Run, Piece]], start: int, end: int, facts: Sequence[FileFacts], page_cache: PageCache
) -> Read:
    file = pending[0][0].fill.file
    copies = tuple(
        Copy(
            target=run.target,
            offset=piece.start_byte - start,
            dtype=run.fill.dtype,
            shape=piece.shape,
            source_stride=piece.source_stride,
            target_stride=piece.target_stride,
            target_start=piece.target_start,
        )
        for run, piece in pending
    )
    methods = methods_for(facts[file], start, end - start, page_cache)
    return Read(file=file, offset=start, nbytes=end - start, methods=methods, copies=copies)


def _readers(reads: Sequence[Read], facts: MachineFacts) -> int:
    """Return the number of threads: those that wait for a disk sleep, those that copy cached pages need a core each."""
    total = sum(read.nbytes for read in reads)
    waiting = sum(read.nbytes for read in reads if not _is_cached(facts.files[read.file], read.offset, read.nbytes))
    wanted = options.WAITING_READERS if 2 * waiting > total else facts.cores
    return max(1, min(wanted, len(reads)))


def _predict(targets: Sequence[Target], blocks: Sequence[Block], arenas: Sequence[int], staging_bytes: int) -> Peaks:
    page = options.BLOCK_BYTES
    mapped = sum(
        round_up(block.lead_bytes + target.nbytes, page)
        for target, block in zip(targets, blocks, strict=True)
        if block.kind == "mapping"
    )
    small = sum(round_up(arena, page) for arena in arenas)
    overhead = options.OVERHEAD_BYTES + options.OVERHEAD_PER_TENSOR_BYTES * len(targets)
    anon = mapped + small + staging_bytes + overhead
    return Peaks(anon_bytes=anon, file_bytes=0, shmem_bytes=0, total_bytes=anon)


def _reasons(
    reads: Sequence[Read], files: Sequence[FileRecord], facts: MachineFacts, page_cache: PageCache
) -> tuple[str, ...]:
    reasons = []
    for number, (file, known) in enumerate(zip(files, facts.files, strict=True)):
        of_file = [read for read in reads if read.file == number]
        direct = sum(read.nbytes for read in of_file if read.methods[0] == "direct")
        total = sum(read.nbytes for read in of_file)
        if page_cache != "auto":
            why = f"page_cache={page_cache!r}"
        elif not known.direct_io:
            why = f"file system {known.filesystem or 'unknown'} gets buffered reads"
        else:
            why = f"{sum(known.cached)} of {len(known.cached)} probes were cached"
        reasons.append(f"{file.path}: {format_bytes(direct)} of {format_bytes(total)} direct, because {why}")
    return tuple(reasons)
