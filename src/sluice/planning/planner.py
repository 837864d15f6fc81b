"""From targets and facts to a plan: a pure function, no I/O, no allocation, no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES
from sluice._errors import BudgetError
from sluice._geometry import round_down, round_up
from sluice._options import PageCache
from sluice._units import format_bytes
from sluice.planning.budget import address_space_bytes
from sluice.planning.cuda_allocator import plan_reservation, scratch_bytes
from sluice.planning.mappings import NOTHING_MAPPED, Mapped
from sluice.planning.memory_layout import lay_out_blocks
from sluice.planning.reads import Run, StagedReads, collapse_fills, is_cached, overlapped, read_in_place, takes_bytes
from sluice.records import (
    AccessFacts,
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

__all__ = ["copier_count", "most_threads", "plan_load", "reader_count", "staging_buffer_bytes"]


def plan_load(
    targets: Sequence[Target],
    files: tuple[FileRecord, ...],
    facts: MachineFacts,
    *,
    staging_bytes: int,
    page_cache: PageCache = "auto",
    mapped: Mapped = NOTHING_MAPPED,
) -> LoadPlan:
    """Return the complete plan that fills ``targets``.

    Args:
        targets: Final memory and its fills.
        files: The files that the fills read.
        facts: What was asked of the machine, one ``FileFacts`` for each file.
        staging_bytes: The most that staging buffers may take together.
        page_cache: See ``sluice._options.PageCache``.
        mapped: The targets that are pages of the files; nothing is read for them.
    """
    on_devices = any(target.device != "cpu" for target in targets)
    host_casts = facts.cores >= options.HOST_CAST_CORES and any(map(_narrows_on_device, targets))
    runs = [run for run in collapse_fills(targets) if run.target not in mapped.blocks]
    access = largest_access(facts.files[file].access for file in {run.fill.file for run in runs})
    buffer_bytes = staging_buffer_bytes(staging_bytes, access)
    reads, leads = _plan_reads(runs, targets, facts, buffer_bytes, page_cache, host_casts=host_casts)
    blocks, arenas = lay_out_blocks(targets, leads, mapped.blocks)
    shared = [*arenas, *(held.nbytes for held in mapped.ranges)]
    threads = most_threads(
        facts,
        address_space_bytes(targets, blocks, shared, staging_bytes=staging_bytes, huge_pages=facts.huge_pages),
    )
    readers = min(reader_count(reads, facts), threads)
    staged = sum(read.into is None for read in reads)
    # While one buffer is filled, another one is emptied by a copier or still being sent to an accelerator; a reader
    # that copies by itself needs one, and so does the caller's thread where there is no reader.
    waiting = readers > facts.cores
    useful = staged if on_devices else 2 * min(readers, access.parallel_requests) if waiting else max(1, readers)
    buffers = min(max(1, staging_bytes // buffer_bytes), staged, useful)
    unfinished = 2 * max(1, readers) if any(target.finisher for target in targets) else 0
    predicted = _predict(targets, blocks, arenas, buffers * buffer_bytes, unfinished_bytes(reads, targets, unfinished))
    return LoadPlan(
        files=files,
        facts=facts,
        targets=tuple(targets),
        blocks=blocks,
        arenas=arenas,
        reads=tuple(reads),
        readers=readers,
        copiers=copier_count(readers, buffers, threads, facts),
        staging_buffer_bytes=buffer_bytes,
        staging_buffers=buffers,
        final_bytes=sum(target.nbytes for target in targets),
        predicted=predicted,
        devices=tuple(_device_plans(targets, reads, buffer_bytes)),
        device_scratch_bytes=scratch_bytes(buffer_bytes),
        reasons=(*mapped.reasons, *_reasons(reads, files, facts, page_cache), *_cast_reasons(targets, reads)),
        most_unfinished_reads=unfinished,
        drop_behind=page_cache == "bypass" or (page_cache == "auto" and _crowded(reads, facts, predicted)),
        mapped_ranges=mapped.ranges,
    )


def _narrows_on_device(target: Target) -> bool:
    finished = ITEM_BYTES[target.dtype]
    return target.device != "cpu" and any(finished < ITEM_BYTES[fill.dtype] for fill in target.fills)


def staging_buffer_bytes(staging_bytes: int, access: AccessFacts | None = None) -> int:
    """Return the size of one buffer: a share of the gate, between one huge page and one full read.

    There should be two buffers for each reader: one to fill, one to empty.

    Args:
        staging_bytes: The gate.
        access: Facts of the sources that are read; None for local files.
    """
    access = access or local_access()
    if staging_bytes < options.SMALLEST_STAGING_BYTES:
        raise BudgetError(
            "staging is too small",
            expected=f"at least {format_bytes(options.SMALLEST_STAGING_BYTES)}",
            found=format_bytes(staging_bytes),
        )
    if staging_bytes < options.HUGE_PAGE_BYTES:
        return round_down(staging_bytes, options.BLOCK_BYTES)
    share = round_down(staging_bytes // (2 * access.parallel_requests), options.HUGE_PAGE_BYTES)
    return min(max(share, options.HUGE_PAGE_BYTES), access.request_bytes)


def _plan_reads(
    runs: Sequence[Run],
    targets: Sequence[Target],
    facts: MachineFacts,
    buffer_bytes: int,
    page_cache: PageCache,
    *,
    host_casts: bool,
) -> tuple[list[Read], dict[int, int]]:
    """Return all reads in file order, and the bytes to leave before each target that is read directly."""
    shared = overlapped(runs)
    reads: list[Read] = []
    leads: dict[int, int] = {}
    staged = StagedReads(targets, facts.files, buffer_bytes=buffer_bytes, page_cache=page_cache, host_casts=host_casts)
    for run in runs:
        target = targets[run.target]
        placed = None
        if takes_bytes(target, run) and id(run) not in shared:
            placed = read_in_place(run, target, facts.files[run.fill.file], page_cache)
        if placed is None:
            staged.add(run)
        else:
            leads[run.target], in_place = placed
            reads.extend(in_place)
    reads.extend(staged.reads())
    reads.sort(key=lambda read: (read.file, read.offset))
    return reads, leads


def reader_count(reads: Sequence[Read], facts: MachineFacts) -> int:
    """Return the number of threads: those that wait for a disk sleep, those that copy cached pages need a core each."""
    total = sum(read.nbytes for read in reads)
    waiting = sum(read.nbytes for read in reads if not is_cached(facts.files[read.file], read.offset, read.nbytes))
    wanted = _waiting_readers(reads, total, facts) if 2 * waiting > total else facts.cores
    return max(1, min(wanted, len(reads)))


def _waiting_readers(reads: Sequence[Read], total_bytes: int, facts: MachineFacts) -> int:
    """Return the number of threads that keep the bytes of ``parallel_requests`` full requests in flight."""
    access = largest_access(facts.files[file].access for file in {read.file for read in reads})
    staged_bytes = sum(read.nbytes for read in reads if read.into is None)
    if 2 * staged_bytes > total_bytes:
        return access.parallel_requests  # more of them would take the buffers that are being emptied
    at_once = access.parallel_requests * access.request_bytes * len(reads) // total_bytes
    return max(access.parallel_requests, min(at_once, options.MOST_WAITING_READERS))


def copier_count(readers: int, buffers: int, threads: int, facts: MachineFacts) -> int:
    """Return the number of threads that empty buffers while readers, most of which wait for a disk, fill others."""
    return max(0, min(facts.cores, buffers - 1, threads - readers)) if readers > facts.cores else 0


def most_threads(facts: MachineFacts, needed_bytes: int) -> int:
    """Return the number of threads whose stacks and arenas fit beside ``needed_bytes`` under a limit on virtual memory.

    None may fit: a single reader whose stack and arena were mapped first would take the place of the last weights.
    """
    if facts.address_space_bytes is None:
        most_readers = max(options.MOST_WAITING_READERS, facts.access.parallel_requests)
        return most_readers + max(facts.cores, options.WRITERS)  # the most that any plan uses
    return max(0, facts.address_space_bytes - needed_bytes) // options.THREAD_ADDRESS_BYTES


def _crowded(reads: Sequence[Read], facts: MachineFacts, predicted: Peaks) -> bool:
    """Return whether the file pages that the reads would leave do not fit the control group beside the weights.

    The kernel takes such pages away before it kills, but it does so late, page by page and in the way of the load.
    What is cached already is charged to whoever read it first, and stays.
    """
    if facts.memory_limit_bytes is None:
        return False
    left = sum(
        read.nbytes
        for read in reads
        if read.methods[0] == "buffered" and not is_cached(facts.files[read.file], read.offset, read.nbytes)
    )
    return predicted.total_bytes + left > facts.memory_limit_bytes


def unfinished_bytes(reads: Sequence[Read], targets: Sequence[Target], most_reads: int) -> int:
    """Return the most bytes of weights that wait for their finishers at once.

    Args:
        reads: In the order in which they start.
        targets: Of the plan.
        most_reads: Reads whose results may wait at once; 0 without finishers.
    """
    if not most_reads:
        return 0
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for number, read in enumerate(reads):
        for position in (read.into,) if read.into is not None else {copy.target for copy in read.copies}:
            if targets[position].finisher:
                first.setdefault(position, number)
                last[position] = number
    changes: defaultdict[int, int] = defaultdict(int)
    for position, number in first.items():
        changes[max(0, number - most_reads)] += targets[position].nbytes
        changes[last[position] + 1] -= targets[position].nbytes
    return max(accumulate(changes[number] for number in sorted(changes)), default=0)


def _predict(
    targets: Sequence[Target],
    blocks: Sequence[Block],
    arenas: Sequence[int],
    staging_bytes: int,
    unfinished: int,
) -> Peaks:
    page = options.BLOCK_BYTES
    mapped = unfinished + sum(
        round_up(target.finisher.finished_bytes if target.finisher else block.lead_bytes + target.nbytes, page)
        for target, block in zip(targets, blocks, strict=True)
        if block.kind == "mapping"
    )
    small = sum(round_up(arena, page) for arena in arenas)
    overhead = options.OVERHEAD_BYTES + options.OVERHEAD_PER_TENSOR_BYTES * len(targets)
    anon = mapped + small + staging_bytes + overhead
    return Peaks(anon_bytes=anon, file_bytes=0, shmem_bytes=0, total_bytes=anon)


def _device_plans(targets: Sequence[Target], reads: Iterable[Read], buffer_bytes: int) -> Iterator[DevicePlan]:
    on_device: defaultdict[str, list[Target]] = defaultdict(list)
    for target in targets:
        if target.device != "cpu":
            on_device[target.device].append(target)
    # Bytes that are not simply the target's are unpacked on the device.
    unpacked = {
        targets[copy.target].device
        for read in reads
        for copy in read.copies
        if copy.cast_at is None
        and (
            copy.dtype != targets[copy.target].dtype
            or copy.source_stride != copy.target_stride
            or copy.elements.computed
        )
    } | {target.device for target in targets if target.constants}
    for device, members in on_device.items():
        new = [target for target in members if not target.existing]
        one_block = not any(target.replaces for target in new)
        yield DevicePlan(
            device=device,
            reservation=plan_reservation((target.nbytes for target in new), one_block=one_block),
            scratch_bytes=scratch_bytes(buffer_bytes) if device in unpacked else 0,
        )


def _reasons(
    reads: Sequence[Read], files: Sequence[FileRecord], facts: MachineFacts, page_cache: PageCache
) -> Iterator[str]:
    direct: defaultdict[str, int] = defaultdict(int)
    total: defaultdict[str, int] = defaultdict(int)
    read_files: defaultdict[str, set[int]] = defaultdict(set)
    because = [_because(file, known, page_cache) for file, known in zip(files, facts.files, strict=True)]
    for read in reads:
        why = because[read.file]
        total[why] += read.nbytes
        direct[why] += read.nbytes if read.methods[0] == "direct" else 0
        read_files[why].add(read.file)
    for why, members in read_files.items():
        where = files[min(members)].path if len(members) == 1 else f"{len(members)} files"
        yield f"{where}: {format_bytes(direct[why])} of {format_bytes(total[why])} read directly, because {why}"


def _because(file: FileRecord, known: FileFacts, page_cache: PageCache) -> str:
    if page_cache != "auto":
        return f"page_cache={page_cache!r}"
    if known.direct_io:
        return f"{sum(known.cached)} of {len(known.cached)} probes were cached"
    if file.identity.nbytes < options.DIRECT_FILE_BYTES:
        return "small files are read through the page cache"
    return f"direct reads are not used on file system {known.filesystem or 'unknown'}"


def _cast_reasons(targets: Sequence[Target], reads: Iterable[Read]) -> Iterator[str]:
    casts = [
        copy
        for read in reads
        for copy in read.copies
        if targets[copy.target].device != "cpu" and copy.dtype != targets[copy.target].dtype
    ]
    host = [copy for copy in casts if copy.cast_at is not None]
    if host:
        saved = sum(copy.shape[0] * (ITEM_BYTES[copy.dtype] - ITEM_BYTES[targets[copy.target].dtype]) for copy in host)
        yield f"{len(host)} of {len(casts)} casts on the host, because that sends {format_bytes(saved)} less"
    elif casts:
        yield "casts on the accelerator: they widen, or the host has too few cores to cast as fast as the bus carries"
