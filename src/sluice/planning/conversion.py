"""Plans targets that are parts of files under construction: read once, in file order, through staging. Pure; no torch.

A target whose elements reach it in long runs is written run by run, wherever they come from. One that would be written
in short pieces (a transposed weight) is finished in memory before, where it fits the share of the gate that is kept
for that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from sluice import _options as options
from sluice._dtypes import ITEM_BYTES
from sluice._geometry import round_up
from sluice._options import PageCache
from sluice.planning.planner import most_threads, plan_load, reader_count
from sluice.planning.reads import StagedReads, as_run, collapse_fills
from sluice.records import Block, FileRecord, LoadPlan, MachineFacts, Peaks, Target

__all__ = ["Gathering", "gatherings", "in_long_runs", "plan_gathering", "plan_stream"]


def in_long_runs(target: Target) -> bool:
    """Return whether the elements of a target come in runs that are worth a write each."""
    if target.constants:
        return False
    item = ITEM_BYTES[target.dtype]
    for fill in target.fills:
        piece = as_run(0, fill).piece
        run = piece.shape[-1] if piece.source_stride[-1] == piece.target_stride[-1] == 1 else 1
        if piece.shape != (run,) and run * item < options.SHORTEST_RUN_BYTES:
            return False
    return True


def plan_stream(
    targets: Sequence[Target],
    files: tuple[FileRecord, ...],
    facts: MachineFacts,
    *,
    staging_bytes: int,
    buffer_bytes: int,
    page_cache: PageCache = "auto",
) -> LoadPlan:
    """Return the plan that brings every byte of ``targets`` through staging, neighbours of a file together.

    Args:
        targets: Parts of files under construction.
        files: The files that the fills read.
        facts: What was asked of the machine, one ``FileFacts`` for each file.
        staging_bytes: The most that staging buffers may take together.
        buffer_bytes: Bytes of one of them.
        page_cache: See ``sluice._options.PageCache``.
    """
    staged = StagedReads(targets, facts.files, buffer_bytes=buffer_bytes, page_cache=page_cache, host_casts=False)
    for run in collapse_fills(targets):
        staged.add(run)
    reads = tuple(staged.reads())
    buffers = min(max(1, staging_bytes // buffer_bytes), len(reads))
    threads = most_threads(facts, staging_bytes + options.RESERVED_ADDRESS_BYTES)
    readers = min(reader_count(reads, facts), buffers, threads) if reads else 0
    staging = buffers * buffer_bytes
    return LoadPlan(
        files=files,
        facts=facts,
        targets=tuple(targets),
        blocks=(Block(kind="file"),) * len(targets),
        arenas=(),
        reads=reads,
        readers=readers,
        # They write, which is waiting too.
        copiers=max(0, min(options.WRITERS, buffers - 1, threads - readers)),
        staging_buffer_bytes=buffer_bytes,
        staging_buffers=buffers,
        final_bytes=sum(target.nbytes for target in targets),
        predicted=Peaks(anon_bytes=staging, file_bytes=0, shmem_bytes=0, total_bytes=staging),
        drop_behind=page_cache == "bypass",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathering:
    """Targets that are finished in memory together."""

    #: Their positions.
    targets: tuple[int, ...]
    #: First byte of each in that memory.
    offsets: tuple[int, ...]


def gatherings(targets: Sequence[Target], wanted: Iterable[int], window_bytes: int) -> Iterator[Gathering]:
    """Yield the targets at positions ``wanted`` in groups that fit ``window_bytes``; each of them does.

    Args:
        targets: All targets.
        wanted: Positions of those that are finished in memory.
        window_bytes: Bytes of the memory.
    """
    held: list[int] = []
    offsets: list[int] = []
    end = 0
    for position in wanted:
        nbytes = targets[position].nbytes
        if held and end + nbytes > window_bytes:
            yield Gathering(targets=tuple(held), offsets=tuple(offsets))
            held, offsets, end = [], [], 0
        held.append(position)
        offsets.append(end)
        end = round_up(end + nbytes, options.TENSOR_ALIGNMENT_BYTES)
    if held:
        yield Gathering(targets=tuple(held), offsets=tuple(offsets))


def plan_gathering(
    targets: Sequence[Target],
    files: tuple[FileRecord, ...],
    facts: MachineFacts,
    *,
    staging_bytes: int,
    page_cache: PageCache = "auto",
) -> LoadPlan:
    """Return the plan that fills ``targets`` in memory that the caller supplies."""
    existing = [replace(target, existing=True) for target in targets]
    return plan_load(existing, files, facts, staging_bytes=staging_bytes, page_cache=page_cache)
