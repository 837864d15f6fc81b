"""How many threads read and copy, and how many staging buffers they share, of which size. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from sluice import _defaults as defaults
from sluice._errors import BudgetError
from sluice._units import format_bytes
from sluice.planning.reads import is_cached
from sluice.records import AccessFacts, MachineFacts, Read, largest_access, local_access
from sluice.records.geometry import round_down

__all__ = ["buffer_count", "reader_count", "staging_buffer_bytes"]


@lru_cache(maxsize=64)
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


def buffer_count(
    staged: int, facts: MachineFacts, access: AccessFacts, *, on_devices: bool, readers: int, most: int
) -> int:
    """Return the number of staging buffers.

    Readers that wait for a disk need two buffers each: while one is filled, a copier empties the other. A reader that
    copies its own reads needs one, and so does the thread of the caller without readers. Transfers to an accelerator
    hold buffers until they are done, so that every buffer helps.

    Args:
        staged: Number of reads that go through staging.
        facts: Facts about the machine.
        access: Largest access facts of the files that are read.
        on_devices: Whether there are targets on accelerators.
        readers: Number of reader threads.
        most: Number of buffers that staging has room for.
    """
    if on_devices:
        useful = staged
    elif readers > facts.cores:  # most of them wait for a disk
        useful = 2 * min(readers, access.parallel_requests)
    else:
        useful = max(1, readers)
    return min(max(1, most), staged, useful)


def reader_count(reads: Sequence[Read], facts: MachineFacts, *, serial_bytes: int = 0) -> int:
    """Return the number of reader threads; 0 to read in the thread of the caller, as where no thread may start.

    Threads that wait for a disk sleep, so that there may be more of them than cores. Threads that copy cached pages
    need a core each.

    Args:
        reads: All reads of the plan.
        facts: Facts about the machine.
        serial_bytes: Most bytes of local files that are read in the thread of the caller.
    """
    if not facts.threads:
        return 0
    total = sum(read.nbytes for read in reads)
    local = all(facts.files[file].access == local_access() for file in {read.file for read in reads})
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
