"""Plans for conversions, whose targets are parts of output files: read once, in file order, through staging.

A target whose elements arrive in long runs is written run by run. A target that would be written in short runs, such as
a transposed weight, is first finished in memory, if it fits the share of staging that is reserved for this.

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._geometry import round_up
from sluice._options import PageCache
from sluice.planning.planner import plan_load
from sluice.planning.reads import StagedReads, collapse_fill, collapse_fills
from sluice.planning.requests import join_requests
from sluice.planning.threads import most_threads, reader_count
from sluice.records import Block, FileRecord, LoadPlan, MachineFacts, Peaks, Target

__all__ = ["TargetGroup", "group_targets", "in_long_runs", "plan_group", "plan_stream"]


def in_long_runs(target: Target) -> bool:
    """Return whether the elements of a target arrive in runs that are long enough for one write per run."""
    if target.constants:
        return False
    item = ITEM_BYTES[target.dtype]
    for fill in target.fills:
        piece, packing = collapse_fill(0, fill).piece, fill.elements.packing
        taken = 1 if packing is None else packing.taken
        run_elements = taken if packing is None or packing.target_step == 1 else 1
        adjacent = piece.source_stride[-1] == 1 and piece.target_stride[-1] == run_elements == taken
        if adjacent:
            run_elements *= piece.shape[-1]
        whole = run_elements == taken * prod(piece.shape)
        if not whole and run_elements * item < defaults.SHORTEST_RUN_BYTES:
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
    """Return the plan that reads all bytes of ``targets`` through staging, with neighboring ranges in one read.

    Args:
        targets: Parts of output files.
        files: Files that the fills read.
        facts: Facts about the machine, with one ``FileFacts`` per file.
        staging_bytes: Most bytes of all staging buffers together.
        buffer_bytes: Bytes of one staging buffer.
        page_cache: See ``sluice._options.PageCache``.
    """
    staged = StagedReads(targets, facts.files, buffer_bytes=buffer_bytes, page_cache=page_cache, host_casts=False)
    for fill in collapse_fills(targets):
        staged.add(fill)
    reads = tuple(join_requests(staged.reads(), facts.files))
    buffers = min(max(1, staging_bytes // buffer_bytes), len(reads))
    threads = most_threads(facts, staging_bytes + defaults.RESERVED_ADDRESS_BYTES)
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
        # Copiers write to files and wait for the disk, so that there may be more of them than cores.
        copiers=max(0, min(defaults.WRITERS, buffers - 1, threads - readers)),
        staging_buffer_bytes=buffer_bytes,
        staging_buffers=buffers,
        final_bytes=sum(target.nbytes for target in targets),
        predicted=Peaks(anon_bytes=staging, file_bytes=0, shmem_bytes=0, total_bytes=staging),
        drop_behind=page_cache == "bypass",
    )


class TargetGroup(Struct, frozen=True, kw_only=True):
    """Targets that are finished in memory at the same time, before they are written."""

    #: Positions of the targets.
    targets: tuple[int, ...]
    #: First byte of each target in the memory.
    offsets: tuple[int, ...]


def group_targets(targets: Sequence[Target], positions: Iterable[int], window_bytes: int) -> Iterator[TargetGroup]:
    """Yield the targets at ``positions`` in groups that fit ``window_bytes``.

    Args:
        targets: All targets.
        positions: Positions of the targets to finish in memory; each of them fits ``window_bytes``.
        window_bytes: Bytes of the memory.
    """
    members: list[int] = []
    offsets: list[int] = []
    end = 0
    for position in positions:
        nbytes = targets[position].nbytes
        if members and end + nbytes > window_bytes:
            yield TargetGroup(targets=tuple(members), offsets=tuple(offsets))
            members, offsets, end = [], [], 0
        members.append(position)
        offsets.append(end)
        end = round_up(end + nbytes, defaults.TENSOR_ALIGNMENT_BYTES)
    if members:
        yield TargetGroup(targets=tuple(members), offsets=tuple(offsets))


def plan_group(
    targets: Sequence[Target],
    files: tuple[FileRecord, ...],
    facts: MachineFacts,
    *,
    staging_bytes: int,
    page_cache: PageCache = "auto",
) -> LoadPlan:
    """Return the plan that fills a group of targets in memory that the caller supplies."""
    existing = [replace(target, existing=True) for target in targets]
    return plan_load(existing, files, facts, staging_bytes=staging_bytes, page_cache=page_cache)
