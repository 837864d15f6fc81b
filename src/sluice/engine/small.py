"""Small plans: reads through the page cache, in the thread of the caller. A ``Session`` runs every other plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from sluice import _defaults as defaults
from sluice.engine.host_memory import HostMemory
from sluice.engine.running_plan import RunResult, check_process, check_unchanged
from sluice.engine.staging import StagingBuffer
from sluice.engine.targets import Targets
from sluice.records import LoadPlan
from sluice.sources.protocol import Source
from sluice.sources.ranges import ended_early

__all__ = ["is_small", "run_small"]

#: Most bytes of a buffer in the heap; malloc maps larger ones.
_HEAP_BYTES = 64 << 10


def is_small(plan: LoadPlan) -> bool:
    """Return whether ``run_small`` can run a plan."""
    others = plan.readers or plan.devices or plan.mapped_ranges or plan.most_unfinished_reads or plan.drop_behind
    return not others and all(read.methods == ("buffered",) and not read.continues for read in plan.reads)


def run_small(
    plan: LoadPlan,
    sources: Sequence[Source],
    targets: Targets,
    *,
    progress: Callable[[int], None] | None = None,
    completed: Callable[[int], None] | None = None,
) -> RunResult:
    """Fill every target of a small plan; see ``RunningPlan.wait``."""
    total, process = 0, os.getpid()
    filled = [[copy.target for copy in read.copies] if read.into is None else [read.into] for read in plan.reads]
    last = {position: number for number, positions in enumerate(filled) for position in positions}
    targets.begin()
    staging = _staging(plan)
    for number, read in enumerate(plan.reads):
        source, first = sources[read.file], read.offset % defaults.BLOCK_BYTES
        if read.into is not None or not targets.read_straight(source, read):
            view = staging.view[first : first + read.nbytes]
            if read.into is not None:
                view = targets.window(read.into, read.into_offset, read.nbytes)
            found = source.read_into(read.offset, view)
            if found < read.nbytes:
                raise ended_early(source, read.offset, read.nbytes, found)
            if read.into is None:
                targets.copy_out(read, staging, first)
        total += read.nbytes
        if progress:
            progress(total)
            check_process(process)
        for position in dict.fromkeys(filled[number]):
            if completed and last[position] == number:
                completed(position)
    check_unchanged(plan, sources)
    return RunResult(read_bytes={"direct": 0, "buffered": total}, stepped_down=0, surprises={})


def _staging(plan: LoadPlan) -> StagingBuffer:
    """Return a buffer for the largest staged read."""
    room = max((read.nbytes for read in plan.reads if read.into is None), default=0) + defaults.BLOCK_BYTES
    if room <= _HEAP_BYTES:  # its pages are resident: their first touch takes longer than a small read
        return StagingBuffer(bytearray(room), 0, room)
    memory = HostMemory(room, huge_pages=plan.huge_staging)
    return StagingBuffer(memory.mapping, memory.start, room)
