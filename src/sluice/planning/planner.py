"""The planner: ``plan_load`` turns targets and facts into a complete plan.

Pure functions: no I/O, no allocation, no torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, chain

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._errors import BudgetError
from sluice._geometry import round_down, round_up
from sluice._options import PageCache
from sluice._units import format_bytes
from sluice.planning.budget import address_space_bytes
from sluice.planning.cuda_allocator import plan_reservation, scratch_bytes
from sluice.planning.mappings import NOTHING_MAPPED, Mapped
from sluice.planning.memory_layout import lay_out_blocks
from sluice.planning.reads import (
    CollapsedFill,
    StagedReads,
    cached_share,
    collapse_fills,
    is_cached,
    needs_no_staging,
    read_in_place,
    shared_ids,
)
from sluice.planning.reasons import cast_reasons, read_reasons
from sluice.planning.requests import join_requests
from sluice.records import (
    AccessFacts,
    Block,
    DevicePlan,
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
    fills = [fill for fill in collapse_fills(targets) if fill.target not in mapped.blocks]
    access = largest_access(facts.files[file].access for file in {fill.fill.file for fill in fills})
    buffer_bytes = staging_buffer_bytes(staging_bytes, access)
    reads, leads = _plan_reads(fills, targets, facts, buffer_bytes, page_cache)
    if not any(target.finisher for target in targets):  # otherwise readers wait between two reads
        reads = list(join_requests(reads, facts.files))
    blocks, arenas = lay_out_blocks(targets, leads, mapped.blocks)
    threads = most_threads(facts, _address_space_bytes(targets, blocks, arenas, mapped, staging_bytes, facts))
    readers = min(reader_count(reads, facts, serial_bytes=serial_bytes), threads)
    buffers = _buffer_count(reads, targets, facts, access, readers=readers, most=staging_bytes // buffer_bytes)
    most_unfinished = 2 * max(1, readers) if any(target.finisher for target in targets) else 0
    unfinished = _most_unfinished(reads, targets, most_unfinished, lambda each: each.nbytes * (each.device == "cpu"))
    predicted = _predict(targets, blocks, arenas, staging_bytes=buffers * buffer_bytes, unfinished=unfinished)
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
        final_bytes=sum(each.finisher.finished_bytes if each.finisher else each.nbytes for each in targets),
        predicted=predicted,
        devices=tuple(_device_plans(targets, reads, buffer_bytes, most_unfinished)),
        device_scratch_bytes=scratch_bytes(buffer_bytes),
        reasons=(*mapped.reasons, *read_reasons(reads, files, facts, page_cache), *cast_reasons(targets, reads)),
        most_unfinished_reads=most_unfinished,
        drop_behind=_drops_pages(reads, facts, predicted, page_cache),
        joins_readers=_joins_readers(reads, facts, predicted, page_cache),
        mapped_ranges=mapped.ranges,
        huge_staging=facts.huge_pages and any(read.nbytes >= defaults.HUGE_PAGE_BYTES for read in reads),
    )


def staging_buffer_bytes(staging_bytes: int, access: AccessFacts | None = None) -> int:
    """Return the size of one staging buffer, between one huge page and one full request.

    The aim is two buffers per reader: one to fill and one to empty.

    Args:
        staging_bytes: Most bytes of all staging buffers together.
        access: Access facts of the sources that are read; None for local files.

    Raises:
        BudgetError: ``staging_bytes`` is less than the smallest staging.
    """
    access = access or local_access()
    if staging_bytes < defaults.SMALLEST_STAGING_BYTES:
        raise BudgetError(
            "staging is too small",
            expected=f"at least {format_bytes(defaults.SMALLEST_STAGING_BYTES)}",
            found=format_bytes(staging_bytes),
        )
    if staging_bytes < defaults.HUGE_PAGE_BYTES:
        return round_down(staging_bytes, defaults.BLOCK_BYTES)
    share = round_down(staging_bytes // (2 * access.parallel_requests), defaults.HUGE_PAGE_BYTES)
    return min(max(share, defaults.HUGE_PAGE_BYTES), access.request_bytes)


def _plan_reads(
    fills: Sequence[CollapsedFill],
    targets: Sequence[Target],
    facts: MachineFacts,
    buffer_bytes: int,
    page_cache: PageCache,
) -> tuple[list[Read], dict[int, int]]:
    """Return all reads in file order, and the bytes to leave before each target that is read without staging."""
    shared = shared_ids(fills)
    reads: list[Read] = []
    leads: dict[int, int] = {}
    staged = StagedReads(
        targets,
        facts.files,
        buffer_bytes=buffer_bytes,
        page_cache=page_cache,
        host_casts=facts.cores >= defaults.HOST_CAST_CORES and any(map(_narrows_on_device, targets)),
    )
    for fill in fills:
        target = targets[fill.target]
        in_place = None
        if needs_no_staging(target, fill) and id(fill) not in shared:
            in_place = read_in_place(fill, target, facts.files[fill.fill.file], page_cache)
        if in_place is None:
            staged.add(fill)
        else:
            leads[fill.target], target_reads = in_place
            reads.extend(target_reads)
    reads.extend(staged.reads())
    reads.sort(key=lambda read: (read.file, read.offset))
    return reads, leads


def _narrows_on_device(target: Target) -> bool:
    """Return whether a target on an accelerator has a narrower dtype than any of its fills."""
    finished = ITEM_BYTES[target.dtype]
    return target.device != "cpu" and any(finished < ITEM_BYTES[fill.dtype] for fill in target.fills)


def _address_space_bytes(
    targets: Sequence[Target],
    blocks: Sequence[Block],
    arenas: Sequence[int],
    mapped: Mapped,
    staging_bytes: int,
    facts: MachineFacts,
) -> int:
    """Return the virtual memory of the load without its threads, in bytes."""
    shared = [*arenas, *(mapping.nbytes for mapping in mapped.ranges)]
    return address_space_bytes(targets, blocks, shared, staging_bytes=staging_bytes, huge_pages=facts.huge_targets)


def _buffer_count(
    reads: Sequence[Read],
    targets: Sequence[Target],
    facts: MachineFacts,
    access: AccessFacts,
    *,
    readers: int,
    most: int,
) -> int:
    """Return the number of staging buffers.

    Readers that wait for a disk need two buffers each: while one is filled, a copier empties the other. A reader that
    copies its own reads needs one, and so does the thread of the caller without readers. Transfers to an accelerator
    hold buffers until they are done, so that every buffer helps.

    Args:
        reads: All reads of the plan.
        targets: All targets of the plan.
        facts: Facts about the machine.
        access: Largest access facts of the files that are read.
        readers: Number of reader threads.
        most: Number of buffers that staging has room for.
    """
    staged = sum(read.into is None for read in reads)
    if any(target.device != "cpu" for target in targets):
        useful = staged
    elif readers > facts.cores:  # most of them wait for a disk
        useful = 2 * min(readers, access.parallel_requests)
    else:
        useful = max(1, readers)
    return min(max(1, most), staged, useful)


def reader_count(reads: Sequence[Read], facts: MachineFacts, *, serial_bytes: int = 0) -> int:
    """Return the number of reader threads; 0 to read in the thread of the caller.

    Threads that wait for a disk sleep, so that there may be more of them than cores. Threads that copy cached pages
    need a core each.

    Args:
        reads: All reads of the plan.
        facts: Facts about the machine.
        serial_bytes: Most bytes of local files that are read in the thread of the caller.
    """
    total = sum(read.nbytes for read in reads)
    local = all(facts.files[read.file].access == local_access() for read in reads)
    waiting = [read for read in reads if _waits(read, facts)]
    mostly_waits = 2 * sum(read.nbytes for read in waiting) > total
    probed = any(file.cached for file in facts.files)
    copied = sum(len(read.copies) for read in reads)
    # Threads that copy many small tensors wait for the lock of the interpreter.
    tiny = total < defaults.SMALL_COPY_BYTES * copied and not (probed and mostly_waits)
    if serial_bytes and not waiting:
        serial_bytes = max(serial_bytes, defaults.CACHED_SERIAL_BYTES)
    if serial_bytes and local and total > 0 and (total <= serial_bytes or tiny):
        return 0
    if not waiting:
        return max(1, min(facts.cores, len(reads)))
    copying = min(facts.cores, len(reads) - len(waiting))
    most = max(defaults.MOST_WAITING_READERS, facts.access.parallel_requests)
    requests = sum(not read.continues for read in waiting)
    return min(min(_waiting_readers(waiting, facts), requests) + copying, most)


def _waits(read: Read, facts: MachineFacts) -> bool:
    """Return whether a read mostly waits for a disk."""
    return read.methods[0] == "direct" or not is_cached(facts.files[read.file], read.offset, read.nbytes)


def _waiting_readers(reads: Sequence[Read], facts: MachineFacts) -> int:
    """Return the number of threads that keep the bytes of ``parallel_requests`` full requests in flight."""
    total_bytes = sum(read.nbytes for read in reads)
    access = largest_access(facts.files[file].access for file in {read.file for read in reads})
    staged_bytes = sum(read.nbytes for read in reads if read.into is None)
    if 2 * staged_bytes > total_bytes:
        return access.parallel_requests  # more readers would occupy buffers that are being emptied
    requests = sum(not read.continues for read in reads)
    at_once = access.parallel_requests * access.request_bytes * requests // total_bytes
    return max(access.parallel_requests, min(at_once, defaults.MOST_WAITING_READERS))


def copier_count(readers: int, buffers: int, threads: int, facts: MachineFacts) -> int:
    """Return the number of threads that copy out of staging; 0 if readers do it because they rarely wait for a disk."""
    return max(0, min(facts.cores, buffers - 1, threads - readers)) if readers > facts.cores else 0


def most_threads(facts: MachineFacts, needed_bytes: int) -> int:
    """Return the number of threads that fit next to ``needed_bytes`` under a limit on virtual memory.

    A thread takes a stack and a malloc arena. The number can be 0: even one reader, mapped first, could take the room
    of the last weights.
    """
    if facts.address_space_bytes is None:
        most_readers = max(defaults.MOST_WAITING_READERS, facts.access.parallel_requests)
        return most_readers + max(facts.cores, defaults.WRITERS)  # most threads of any plan
    return max(0, facts.address_space_bytes - needed_bytes) // defaults.THREAD_ADDRESS_BYTES


def _drops_pages(reads: Sequence[Read], facts: MachineFacts, predicted: Peaks, page_cache: PageCache) -> bool:
    """Return whether to drop the pages of buffered reads from the page cache after use.

    With ``page_cache="auto"`` they are dropped if they would not fit the control group together with the weights. The
    kernel reclaims such pages before it kills the process, but late, page by page, and in the way of the load. Pages
    that are already cached are charged to the control group that read them first, and are not counted.
    """
    if page_cache != "auto" or facts.memory_limit_bytes is None:
        return page_cache == "bypass"
    new_pages = sum(
        read.nbytes * (1 - cached_share(facts.files[read.file], read.offset, read.nbytes))
        for read in reads
        if read.methods[0] == "buffered"
    )
    return predicted.total_bytes + new_pages > facts.memory_limit_bytes


def _joins_readers(reads: Sequence[Read], facts: MachineFacts, predicted: Peaks, page_cache: PageCache) -> bool:
    """Return whether to read through the page cache what other processes read at the same time.

    Only if the file fits the control group together with the weights: otherwise its pages are dropped before the other
    processes come to them.
    """
    if page_cache != "auto" or facts.memory_limit_bytes is None:
        return page_cache == "auto"
    return predicted.total_bytes + sum(read.nbytes for read in reads) <= facts.memory_limit_bytes


def _most_unfinished(
    reads: Sequence[Read], targets: Sequence[Target], most_reads: int, weigh: Callable[[Target], int]
) -> int:
    """Return the most weights, or bytes of weights, that wait for their finishers at the same time.

    Args:
        reads: Reads in the order in which they start.
        targets: All targets of the plan.
        most_reads: Most finished reads that may wait at the same time; 0 without finishers.
        weigh: Returns how much a weight counts.
    """
    if not most_reads:
        return 0
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for step, read in enumerate(reads):
        for position in (read.into,) if read.into is not None else {copy.target for copy in read.copies}:
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
    *,
    staging_bytes: int,
    unfinished: int,
) -> Peaks:
    """Return the predicted growth of host memory."""
    page = defaults.BLOCK_BYTES
    mapped = unfinished + sum(
        round_up(target.finisher.finished_bytes if target.finisher else block.lead_bytes + target.nbytes, page)
        for target, block in zip(targets, blocks, strict=True)
        if block.kind == "mapping"
    )
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
