"""Reads of bytes that several ranks need: rounds, in which one rank reads a range and hands it to the others.

Every rank plans its own load. Its reads are divided into the smallest ranges that are copied from (``pieces_of``), and
all ranks compare them. Ranges that overlap are needed by several ranks: replicated tensors, and columns of the same
rows. Small ranges side by side count as one, because a disk reads whole blocks. Each becomes a round if it fits a
staging buffer (``schedule``). Its owner is the rank among those that need it with the fewest bytes to read so far, the
largest rounds first. What is in no round is read by the rank that needs it (``divide``).

Pure functions: no I/O, no torch.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._geometry import round_down, span_elements
from sluice.planning.requests import join_requests
from sluice.records import Copy, LoadPlan, Read, Round

__all__ = ["Needs", "Schedule", "divide", "needs_of", "pieces_of", "schedule", "with_room_for_rounds"]


class Needs(Struct, frozen=True, kw_only=True):
    """The ranges that one rank needs."""

    #: File, first byte and end of each range, ascending.
    ranges: tuple[tuple[int, int, int], ...]
    #: Bytes of other reads, which cannot be shared.
    other_bytes: int
    #: Most bytes of one round that its staging holds.
    most_bytes: int
    #: Ranks of each process group to which it belongs.
    groups: tuple[tuple[int, ...], ...]


class Schedule(Struct, frozen=True, kw_only=True):
    """The rounds of all ranks, in their order."""

    #: File, first byte, end, owner, position in ``groups``, and the ranks that need the bytes.
    rounds: tuple[tuple[int, int, int, int, int, tuple[int, ...]], ...]
    #: Ranks of the process groups that the rounds use.
    groups: tuple[tuple[int, ...], ...]


def needs_of(plan: LoadPlan, groups: tuple[tuple[int, ...], ...]) -> Needs:
    """Return what a rank needs.

    Args:
        plan: The plan of its load.
        groups: Ranks of each process group to which it belongs.
    """
    most = most_round_bytes(plan)
    ranges: list[tuple[int, int, int]] = []
    other = 0
    for read in plan.reads:
        if not can_share(read):
            other += read.nbytes
            continue
        ranges += [(piece.file, piece.offset, piece.offset + piece.nbytes) for piece in pieces_of(read, most)]
    return Needs(ranges=tuple(sorted(ranges)), other_bytes=other, most_bytes=most, groups=groups)


def schedule(needs: Mapping[int, Needs]) -> Schedule:
    """Return the rounds of a load, the same for the same needs.

    Args:
        needs: What each rank needs.
    """
    everybody = tuple(sorted(needs))
    groups = sorted(
        {group for each in needs.values() for group in each.groups if set(group) <= needs.keys()},
        key=lambda group: (len(group), group),
    )
    groups = [group for group in groups if all(group in needs[rank].groups for rank in group)]
    if everybody not in groups:
        return Schedule(rounds=(), groups=())
    found = list(_shared_ranges(needs))
    load = {
        rank: each.other_bytes + sum(stop - start for _, start, stop in each.ranges) for rank, each in needs.items()
    }
    for *_, ranks, own in found:
        for rank in ranks:
            load[rank] -= own[rank]
    owners: dict[int, int] = {}
    for number in sorted(range(len(found)), key=lambda number: (found[number][1] - found[number][2], number)):
        _, start, stop, ranks, _ = found[number]
        owner = min(ranks, key=lambda rank: (load[rank], rank))
        load[owner] += stop - start
        owners[number] = owner
    group_of = {
        ranks: next(number for number, group in enumerate(groups) if set(ranks) <= set(group))
        for ranks in {ranks for *_, ranks, _ in found}
    }
    return Schedule(
        rounds=tuple(
            (file, start, stop, owners[number], group_of[ranks], ranks)
            for number, (file, start, stop, ranks, _) in enumerate(found)
        ),
        groups=tuple(groups),
    )


def divide(plan: LoadPlan, rounds: Schedule, rank: int) -> LoadPlan:
    """Return the plan of a rank with only the reads that it makes for itself, and with the rounds it takes part in.

    Args:
        plan: Its plan without rounds.
        rounds: The rounds of all ranks.
        rank: The rank.
    """
    starts = [(file, start) for file, start, *_ in rounds.rounds]
    inside: defaultdict[int, list[Read]] = defaultdict(list)
    own: list[Read] = []
    for read in plan.reads:
        if not can_share(read):
            own.append(read)
            continue
        left: list[Read] = []
        for piece in pieces_of(read, most_round_bytes(plan)):
            number = bisect_right(starts, (piece.file, piece.offset)) - 1
            if number >= 0 and _contains(rounds.rounds[number], piece):
                inside[number].append(piece)
            else:
                left.append(piece)
        own += joined(left, most_round_bytes(plan))
    own.sort(key=lambda read: (read.file, read.offset))
    return replace(
        plan,
        reads=tuple(join_requests(own, plan.facts.files)),
        readers=min(plan.readers, len(own)),
        rounds=tuple(
            Round(
                file=file,
                offset=start,
                nbytes=stop - start,
                owner=owner,
                group=group,
                takes_part=rank in rounds.groups[group],
                reads=tuple(inside[number]),
            )
            for number, (file, start, stop, owner, group, _) in enumerate(rounds.rounds)
        ),
    )


def with_room_for_rounds(plan: LoadPlan) -> LoadPlan:
    """Return a plan whose prediction has the staging buffer that rounds need, if it has no other."""
    if plan.staging_buffers or not plan.reads:
        return plan
    peaks, more = plan.predicted, plan.staging_buffer_bytes
    peaks = dataclasses.replace(peaks, anon_bytes=peaks.anon_bytes + more, total_bytes=peaks.total_bytes + more)
    return replace(plan, predicted=peaks)


def most_round_bytes(plan: LoadPlan) -> int:
    """Return the most bytes of a round: a staging buffer without its alignment."""
    return plan.staging_buffer_bytes - 2 * defaults.BLOCK_BYTES


def can_share(read: Read) -> bool:
    """Return whether the bytes of a read may come from another rank; swaps and early casts need the whole read."""
    return not read.swaps and all(copy.cast_at is None for copy in read.copies)


def pieces_of(read: Read, most_bytes: int) -> Iterator[Read]:
    """Yield the smallest reads that do the same copies, ascending: one for each range that copies have in common.

    Args:
        read: A read that can be shared.
        most_bytes: Most bytes of a piece that is read in place.
    """
    if read.into is not None:
        step, end = round_down(most_bytes, defaults.BLOCK_BYTES), read.offset + read.nbytes
        start = read.offset
        while start < end:
            stop = min(end, round_down(start, step) + step)
            yield replace(read, offset=start, nbytes=stop - start, into_offset=read.into_offset + start - read.offset)
            start = stop
        return
    group: list[Copy] = []
    stop = 0
    for copy in sorted(read.copies, key=lambda copy: copy.offset):
        if group and copy.offset >= stop:
            yield _around(read, group, stop)
            group = []
        stop = max(stop if group else 0, _end(copy))
        group.append(copy)
    if group:
        yield _around(read, group, stop)


def joined(pieces: Iterable[Read], most_bytes: int) -> Iterator[Read]:
    """Yield reads of neighboring pieces of one read, of which only those are joined that touch, up to a block."""
    last: Read | None = None
    for piece in pieces:
        if last is not None and piece.offset - last.offset - last.nbytes <= defaults.BLOCK_BYTES:
            nbytes = piece.offset + piece.nbytes - last.offset
            if piece.into is not None and last.offset + last.nbytes == piece.offset and nbytes <= defaults.READ_BYTES:
                last = replace(last, nbytes=nbytes)
                continue
            if piece.into is None and nbytes <= most_bytes:
                shift = piece.offset - last.offset
                moved = (replace(copy, offset=copy.offset + shift) for copy in piece.copies)
                last = replace(last, nbytes=nbytes, copies=(*last.copies, *moved))
                continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


#: File, first byte, end, ranks that need some of it, and how many bytes each of them does.
_Shared = tuple[int, int, int, tuple[int, ...], Mapping[int, int]]


def _shared_ranges(needs: Mapping[int, Needs]) -> Iterator[_Shared]:
    """Yield the ranges that several ranks need and that fit a round, ascending."""
    most = min(each.most_bytes for each in needs.values())
    ordered = sorted((file, start, stop, rank) for rank, each in needs.items() for file, start, stop in each.ranges)
    members: list[tuple[int, int, int, int]] = []
    end = 0
    small = True
    for item in ordered:
        file, start, stop, _ = item
        is_small = stop - start < defaults.SHORTEST_RUN_BYTES
        near = bool(members) and members[0][0] == file
        beside = near and small and is_small and 0 <= start - end <= defaults.BLOCK_BYTES
        fits = near and max(end, stop) - members[0][1] <= most
        if members and not (near and (start < end or (beside and fits))):
            yield from _shared(members, end, most)
            members = []
        end, small = (max(end, stop), small and is_small) if members else (stop, is_small)
        members.append(item)
    if members:
        yield from _shared(members, end, most)


def _shared(members: Sequence[tuple[int, int, int, int]], end: int, most: int) -> Iterator[_Shared]:
    own: defaultdict[int, int] = defaultdict(int)
    for _, start, stop, rank in members:
        own[rank] += stop - start
    file, first = members[0][:2]
    if len(own) > 1 and end - first <= most:
        yield file, first, end, tuple(sorted(own)), own


def _contains(found: tuple[int, int, int, int, int, tuple[int, ...]], piece: Read) -> bool:
    file, start, stop, *_ = found
    return file == piece.file and start <= piece.offset and piece.offset + piece.nbytes <= stop


def _around(read: Read, copies: Sequence[Copy], stop: int) -> Read:
    """Return the part of a staged read with some of its copies."""
    start = min(copy.offset for copy in copies)
    moved = tuple(replace(copy, offset=copy.offset - start) for copy in copies)
    return replace(read, offset=read.offset + start, nbytes=stop - start, copies=moved, copies_before_swaps=0)


def _end(copy: Copy) -> int:
    return copy.offset + span_elements(copy.shape, copy.source_stride) * copy.elements.item_bytes
