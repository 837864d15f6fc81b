"""The planner: ``plan_load`` turns targets and facts into a complete plan.

Pure functions: no I/O, no allocation, no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain

from sluice import _defaults as defaults
from sluice._options import PageCache
from sluice._units import format_bytes
from sluice.planning.cuda_allocator import plan_reservation, scratch_bytes
from sluice.planning.mappings import NOTHING_MAPPED, Mapped
from sluice.planning.memory_layout import lay_out_blocks
from sluice.planning.reads import (
    CollapsedFill,
    cached_share,
    collapse_fill,
    is_verbatim,
    join_requests,
    read_in_place,
    shared_ids,
    staged_reads,
)
from sluice.planning.threads import buffer_count, reader_count, staging_buffer_bytes
from sluice.records import (
    REMOTE_FILESYSTEM,
    Block,
    DevicePlan,
    FileFacts,
    FileRecord,
    LoadPlan,
    MachineFacts,
    Peaks,
    Read,
    Target,
    largest_access,
    local_access,
)
from sluice.records.geometry import round_up

__all__ = ["plan_load"]


def plan_load(
    targets: Sequence[Target],
    files: tuple[FileRecord, ...],
    facts: MachineFacts,
    *,
    staging_bytes: int,
    page_cache: PageCache = "auto",
    mapped: Mapped = NOTHING_MAPPED,
    serial_bytes: int = 0,
) -> LoadPlan:
    """Return the complete plan that fills ``targets``.

    Args:
        targets: Final memory and its fills.
        files: Files that the fills read.
        facts: Facts about the machine, with one ``FileFacts`` per file.
        staging_bytes: Most bytes of all staging buffers together.
        page_cache: See ``sluice._options.PageCache``.
        mapped: Targets that are mapped pages of the files, for which nothing is read.
        serial_bytes: Most bytes of local files that are read in the thread of the caller. 0 if the caller works on
            something else while they are read.

    Raises:
        BudgetError: ``staging_bytes`` is less than the smallest staging.
    """
    fills = [collapse_fill(i, fill) for i, each in enumerate(targets) if i not in mapped.blocks for fill in each.fills]
    files_read = {fill.fill.file for fill in fills}
    accesses = {facts.files[number].access for number in files_read}
    access = largest_access(accesses)
    buffer_bytes = staging_buffer_bytes(staging_bytes, access)
    reads, leads = _plan_reads(fills, targets, facts, buffer_bytes, page_cache)
    devices = {target.device for target in targets} - {"cpu"}
    finishers = [target.finisher for target in targets if target.finisher]
    if access.joins_reads and not finishers:  # with finishers readers wait between two reads
        reads = list(join_requests(reads, facts.files))
    blocks, arenas = lay_out_blocks(targets, leads, mapped.blocks)
    sizes, staged = [read.nbytes for read in reads], [read for read in reads if read.into is None]
    if 0 < sum(sizes) <= serial_bytes and accesses == {local_access()} and not devices:  # as for most small models
        readers, buffers = 0, min(1, len(staged))
    else:
        readers, most = reader_count(reads, facts, serial_bytes=serial_bytes), staging_bytes // buffer_bytes
        buffers = buffer_count(len(staged), facts, access, on_devices=bool(devices), readers=readers, most=most)
    most_unfinished = 2 * max(1, readers) if finishers else 0
    predicted = _predict(targets, blocks, arenas, reads, buffers * buffer_bytes, most_unfinished)
    drops_pages, joins_readers = _page_cache_use(reads, facts, predicted, page_cache)
    needs_session = readers or devices or finishers or mapped.ranges or drops_pages
    return LoadPlan(
        files=files,
        facts=facts,
        targets=tuple(targets),
        blocks=blocks,
        arenas=arenas,
        reads=tuple(reads),
        read_bytes=sum(sizes),
        used_files=tuple(sorted(files_read.union([each.file for each in mapped.ranges]))),
        remote=REMOTE_FILESYSTEM in {facts.files[number].filesystem for number in files_read},
        readers=readers,
        # Readers that rarely wait for a disk copy out of staging themselves.
        copiers=max(0, min(facts.cores, buffers - 1)) if readers > facts.cores else 0,
        staging_buffer_bytes=buffer_bytes,
        staging_buffers=buffers,
        final_bytes=sum([each.finisher.finished_bytes if each.finisher else each.nbytes for each in targets]),
        predicted=predicted,
        devices=tuple(_device_plans(targets, reads, buffer_bytes, most_unfinished)) if devices else (),
        device_scratch_bytes=scratch_bytes(buffer_bytes),
        reasons=(*mapped.reasons, *_read_reasons(reads, files, facts, page_cache)),
        most_unfinished_reads=most_unfinished,
        drop_behind=drops_pages,
        joins_readers=joins_readers,
        mapped_ranges=mapped.ranges,
        mapped_bytes=sum([targets[position].nbytes for position in mapped.blocks]),
        huge_staging=facts.huge_pages and max(sizes, default=0) >= defaults.HUGE_PAGE_BYTES,
        small=not needs_session and {(read.methods, read.continues) for read in reads} <= {(("buffered",), False)},
    )


def _plan_reads(
    fills: Sequence[CollapsedFill],
    targets: Sequence[Target],
    facts: MachineFacts,
    buffer_bytes: int,
    page_cache: PageCache,
) -> tuple[list[Read], dict[int, int]]:
    """Return all reads in file order, and the bytes to leave before each target that is read without staging."""
    large = [(fill, to) for fill in fills if (to := targets[fill.target]).nbytes >= defaults.OWN_MAPPING_BYTES]
    candidates = [fill for fill, target in large if target.device == "cpu" and is_verbatim(target, fill)]
    shared = shared_ids(fills) if candidates else set()
    reads: list[Read] = []
    leads: dict[int, int] = {}
    in_place: set[int] = set()
    for fill in candidates:
        found = None
        if id(fill) not in shared:
            found = read_in_place(fill, targets[fill.target], facts.files[fill.fill.file], page_cache)
        if found is not None:
            leads[fill.target], target_reads = found
            in_place.add(fill.target)
            reads.extend(target_reads)
    staged = [fill for fill in fills if fill.target not in in_place] if in_place else fills
    reads.extend(staged_reads(staged, facts.files, buffer_bytes=buffer_bytes, page_cache=page_cache))
    if in_place:  # staged reads are in order
        reads.sort(key=lambda read: (read.file, read.offset))
    return reads, leads


def _page_cache_use(
    reads: Sequence[Read], facts: MachineFacts, predicted: Peaks, page_cache: PageCache
) -> tuple[bool, bool]:
    """Return whether pages of buffered reads are dropped after use, and whether reads join those of other processes.

    With ``page_cache="auto"`` pages are dropped if they would not fit the control group together with the weights. The
    kernel reclaims such pages before it kills the process, but late, page by page, and in the way of the load. Pages
    that are already cached are charged to the control group that read them first, and are not counted. What other
    processes read at the same time is read through the page cache only if all of the reads fit: otherwise its pages are
    dropped before the other processes come to them.
    """
    if page_cache != "auto" or facts.memory_limit_bytes is None:
        return page_cache == "bypass", page_cache == "auto"
    room = facts.memory_limit_bytes - predicted.total_bytes
    new_pages = sum(
        read.nbytes * (1 - cached_share(facts.files[read.file], read.offset, read.nbytes))
        for read in reads
        if read.methods[0] == "buffered"
    )
    return new_pages > room, sum(read.nbytes for read in reads) <= room


def _most_unfinished(
    reads: Sequence[Read], targets: Sequence[Target], most_reads: int, weigh: Callable[[Target], int]
) -> int:
    """Return the most weights, or bytes of weights, that wait for their finishers at the same time.

    Args:
        reads: Reads in the order in which they start.
        targets: All targets of the plan.
        most_reads: Most finished reads that may wait at the same time.
        weigh: Returns how much a weight counts.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, read in enumerate(reads):
        for position in read.targets:
            if targets[position].finisher:
                first.setdefault(position, step)
                last[position] = step
    changes: defaultdict[int, int] = defaultdict(int)
    for position, step in first.items():
        changes[max(0, step - most_reads)] += weigh(targets[position])
        changes[last[position] + 1] -= weigh(targets[position])
    return max(accumulate(changes[step] for step in sorted(changes)), default=0)


def _predict(
    targets: Sequence[Target],
    blocks: Sequence[Block],
    arenas: Sequence[int],
    reads: Sequence[Read],
    staging_bytes: int,
    most_unfinished: int,
) -> Peaks:
    """Return the predicted growth of host memory."""
    page = defaults.BLOCK_BYTES
    mapped = sum(
        round_up(target.finisher.finished_bytes if target.finisher else block.offset + target.nbytes, page)
        for target, block in zip(targets, blocks, strict=True)
        if block.kind == "mapping"
    )
    if most_unfinished:
        mapped += _most_unfinished(reads, targets, most_unfinished, lambda each: each.nbytes * (each.device == "cpu"))
    small = sum(round_up(arena, page) for arena in arenas)
    overhead = defaults.OVERHEAD_BYTES + defaults.OVERHEAD_PER_TENSOR_BYTES * len(targets)
    anon = mapped + small + staging_bytes + overhead
    return Peaks(anon_bytes=anon, file_bytes=0, shmem_bytes=0, total_bytes=anon)


def _device_plans(
    targets: Sequence[Target], reads: Sequence[Read], buffer_bytes: int, most_unfinished: int
) -> Iterator[DevicePlan]:
    """Yield the memory plan of each accelerator."""
    on_device: defaultdict[str, list[Target]] = defaultdict(list)
    for target in targets:
        if target.device != "cpu":
            on_device[target.device].append(target)
    # Casts, strided copies and computations on the device need scratch memory there.
    with_scratch = {
        targets[copy.target].device
        for read in reads
        for copy in read.copies
        if copy.dtype != targets[copy.target].dtype
        or copy.source_stride != copy.target_stride
        or copy.elements.computed
    } | {target.device for target in targets if target.constants}
    for device, members in on_device.items():
        new = [target for target in members if not target.existing]
        one_block = not any(target.replaces for target in new)
        yield DevicePlan(
            device=device,
            reservation=plan_reservation(chain.from_iterable(map(_sizes, new)), one_block=one_block),
            scratch_bytes=scratch_bytes(buffer_bytes) if device in with_scratch else 0,
            working_bytes=_working_bytes(device, targets, reads, most_unfinished),
        )


def _sizes(target: Target) -> Sequence[int]:
    """Return the bytes of each allocation that a target leaves."""
    return (target.nbytes,) if target.finisher is None else target.finisher.finished_sizes


def _working_bytes(device: str, targets: Sequence[Target], reads: Sequence[Read], most_unfinished: int) -> int:
    """Return the bytes of the whole weights on an accelerator that wait for their finishers.

    The allocator may place a small weight in the segment of a large one, so that each is counted as the largest.
    """
    waiting = [target.nbytes for target in targets if target.finisher and target.device == device]
    if not waiting:
        return 0
    count = _most_unfinished(reads, targets, most_unfinished, lambda each: int(each.device == device))
    return plan_reservation([max(waiting)] * count, one_block=False).reserved_bytes


def _read_reasons(
    reads: Sequence[Read], files: Sequence[FileRecord], facts: MachineFacts, page_cache: PageCache
) -> Iterator[str]:
    """Yield one sentence on direct and buffered reads for each reason, with the files that it applies to."""
    direct: defaultdict[str, int] = defaultdict(int)
    total: defaultdict[str, int] = defaultdict(int)
    read_files: defaultdict[str, set[int]] = defaultdict(set)
    reasons = [_read_reason(file, known, page_cache) for file, known in zip(files, facts.files, strict=True)]
    for read in reads:
        if (why := reasons[read.file]) is None:
            continue
        total[why] += read.nbytes
        direct[why] += read.nbytes if read.methods[0] == "direct" else 0
        read_files[why].add(read.file)
    for why, members in read_files.items():
        where = files[min(members)].path if len(members) == 1 else f"{len(members)} files"
        yield f"{where}: {format_bytes(direct[why])} of {format_bytes(total[why])} read directly, because {why}"


def _read_reason(file: FileRecord, known: FileFacts, page_cache: PageCache) -> str | None:
    """Return the reason for the methods of the reads of a file; None if there was no choice."""
    if known.filesystem == REMOTE_FILESYSTEM:
        return None if page_cache == "auto" else f"it is not a local file: page_cache={page_cache!r} has no effect"
    if page_cache != "auto":
        return f"page_cache={page_cache!r}"
    if known.direct_io:
        if not known.cached:
            return "the page cache cannot be probed"
        return f"{sum(known.cached) / len(known.cached):.0%} of the file was cached"
    if file.identity.nbytes < defaults.DIRECT_FILE_BYTES:
        return "small files are read through the page cache"
    return f"direct reads are not used on file system {known.filesystem or 'unknown'}"
