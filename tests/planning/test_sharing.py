"""Rounds of ranks that need the same bytes."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.planning.memory_layout import single_targets
from sluice.planning.planner import plan_load
from sluice.planning.sharing import Needs, divide, needs_of, schedule
from sluice.records import LoadPlan, Read
from support.plans import FILE, MIB, entry, facts, index_of, request

_MOST = 1 << 20


def ranks_need(ranges: dict[int, set[tuple[int, int]]], groups: tuple[tuple[int, ...], ...] = ()) -> dict[int, Needs]:
    everybody = tuple(sorted(ranges))
    return {
        rank: Needs(
            ranges=tuple(sorted((0, start, stop) for start, stop in each)),
            other_bytes=0,
            most_bytes=_MOST,
            groups=(everybody, *(group for group in groups if rank in group)),
        )
        for rank, each in ranges.items()
    }


@st.composite
def needs(draw: st.DrawFn) -> dict[int, set[tuple[int, int]]]:
    """Disjoint ranges of all sizes, each needed by some of the ranks."""
    sizes = st.one_of(st.integers(1, 5000), st.integers(60_000, 70_000), st.just(2 * _MOST))
    position, found = 0, {rank: set[tuple[int, int]]() for rank in range(draw(st.integers(2, 4)))}
    for size in draw(st.lists(sizes, max_size=20)):
        position += draw(st.sampled_from((0, 1, 10_000)))
        for rank in draw(st.sets(st.sampled_from(sorted(found)))):
            found[rank].add((position, position + size))
        position += size
    return found


@given(needs())
def test_every_shared_range_that_fits_is_read_once(ranges: dict[int, set[tuple[int, int]]]) -> None:
    found = schedule(ranks_need(ranges))
    rounds = [(start, stop) for _, start, stop, *_ in found.rounds]
    assert rounds == sorted(rounds)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(rounds))
    for _, start, stop, owner, group, ranks in found.rounds:
        assert stop - start <= _MOST
        assert owner in ranks
        assert set(ranks) <= set(found.groups[group])
    wanted = Counter(each for own in ranges.values() for each in own)
    for (start, stop), count in wanted.items():
        inside = [each for each in rounds if each[0] <= start and stop <= each[1]]
        assert bool(inside) >= (count > 1 and stop - start <= _MOST // 2)


@given(needs())
def test_the_schedule_follows_from_the_needs_alone(ranges: dict[int, set[tuple[int, int]]]) -> None:
    all_needs = ranks_need(ranges)
    assert schedule(all_needs) == schedule(dict(reversed(all_needs.items())))


@given(needs())
def test_owners_are_balanced(ranges: dict[int, set[tuple[int, int]]]) -> None:
    """Ranks that need the same everywhere read the same, up to the largest round."""
    union = set().union(*ranges.values())
    found = schedule(ranks_need(dict.fromkeys(ranges, union)))
    read = Counter(dict.fromkeys(ranges, 0))
    for _, start, stop, owner, *_ in found.rounds:
        read[owner] += stop - start
    largest = max((stop - start for _, start, stop, *_ in found.rounds), default=0)
    assert max(read.values()) - min(read.values()) <= largest


def test_the_smallest_group_that_has_every_rank_is_used() -> None:
    large = (0, 100_000)
    found = schedule(ranks_need({0: {large}, 1: {large}, 2: set(), 3: set()}, ((0, 1), (2, 3))))
    ((*_, group, ranks),) = found.rounds
    assert (found.groups[group], ranks) == ((0, 1), (0, 1))


def test_without_a_group_of_all_ranks_nothing_is_shared() -> None:
    large = (0, 100_000)
    alone = {rank: replace(each, groups=((0,), (1,))) for rank, each in ranks_need({0: {large}, 1: {large}}).items()}
    assert schedule(alone).rounds == ()


def plan_of_columns(first: int, last: int, dtype: str) -> LoadPlan:
    """Return the plan of a rank that holds some columns of one tensor, and all of two others."""
    rows, columns = 300, 4000
    storages = [(0, rows * columns * 4), (rows * columns * 4, 1000), (8 * MIB, 4 * MIB)]
    wanted = [
        entry((rows, last - first), start=first, stride=(columns, 1)),
        entry((250,), storage=1),
        entry((MIB,), storage=2),
    ]
    requests = [request(str(number), each, dtype=dtype) for number, each in enumerate(wanted)]
    targets, _ = single_targets(
        requests, index_of(storages), {number: start for number, (start, _) in enumerate(storages)}
    )
    return plan_load(targets, (FILE,), facts(cached=False), staging_bytes=32 * MIB)


def copied(reads: tuple[Read, ...]) -> Counter[tuple[object, ...]]:
    """Return what reads copy: elements of the file and where they end up; in place, byte by 4096 bytes."""
    found: Counter[tuple[object, ...]] = Counter()
    for read in reads:
        found.update(
            (read.offset + copy.offset, copy.target, copy.target_start, copy.shape, copy.source_stride)
            for copy in read.copies
        )
        if read.into is not None:
            shift = read.offset - read.into_offset
            found.update((read.into, shift, at) for at in range(read.offset, read.offset + read.nbytes, 4096))
    return found


@given(st.integers(100, 3900), st.integers(0, 50), st.sampled_from(["float32", "bfloat16"]))
def test_what_ranks_copy_is_unchanged(border: int, overlap: int, dtype: str) -> None:
    """Each byte that a rank needs is in a read of its own or in one round."""
    plans = {0: plan_of_columns(0, border + overlap, dtype), 1: plan_of_columns(border, 4000, dtype)}
    all_needs = {rank: needs_of(plan, ((0, 1),)) for rank, plan in plans.items()}
    found = schedule(all_needs)
    divided = {rank: divide(plan, found, rank) for rank, plan in plans.items()}
    for rank, plan in plans.items():
        inside = tuple(read for each in divided[rank].rounds for read in each.reads)
        assert copied((*divided[rank].reads, *inside)) == copied(plan.reads)
        assert all(
            each.offset <= read.offset and read.offset + read.nbytes <= each.offset + each.nbytes
            for each in divided[rank].rounds
            for read in each.reads
        )
    total = sum(plan.read_bytes for plan in divided.values()) + sum(each.nbytes for each in divided[0].rounds)
    assert total <= 1.02 * (300 * 4000 * 4 + 1000 + 4 * MIB)
