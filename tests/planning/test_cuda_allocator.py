from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sluice.planning.cuda_allocator import plan_reservation

MIB = 1 << 20


def test_one_block_reserves_what_the_tensors_need() -> None:
    made = plan_reservation([3 * MIB] * 100)
    assert made.requested_bytes == made.allocated_bytes == made.block_bytes == made.reserved_bytes == 300 * MIB
    # Six tensors of 3 MiB to a segment of 20 MiB: what the same tensors cost one by one.
    assert plan_reservation([3 * MIB] * 100, one_block=False).reserved_bytes == 17 * 20 * MIB


def test_small_tensors_are_cut_out_of_small_segments_and_a_small_block_is_kept_out_of_large_ones() -> None:
    made = plan_reservation([100] * 4096)
    assert (made.allocated_bytes, made.block_bytes, made.reserved_bytes) == (4096 * 512, 0, 2 * MIB)
    assert plan_reservation([2 * MIB]).reserved_bytes == 10 * MIB
    assert plan_reservation([2 * MIB], one_block=False).reserved_bytes == 20 * MIB


@given(st.lists(st.integers(0, 64 * MIB), max_size=60))
def test_reserved_covers_allocated_and_one_block_never_costs_more_than_its_bound(sizes: list[int]) -> None:
    made = plan_reservation(sizes)
    assert made.requested_bytes == sum(sizes)
    assert made.requested_bytes <= made.allocated_bytes <= made.requested_bytes + 512 * len(sizes)
    assert made.allocated_bytes <= made.reserved_bytes
    assert made.allocated_bytes <= plan_reservation(sizes, one_block=False).reserved_bytes
    if sum(sizes) >= 10 * MIB:
        small = sum(size <= MIB for size in sizes)
        assert made.reserved_bytes <= made.allocated_bytes + 10 * MIB + small * MIB
