"""The weights of a streamed model that stay in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from sluice.planning.streaming import Step, Streaming, choose_resting, decide_streaming


def _decide(sizes: Sequence[int], memory: int, *, fixed: int = 0, steps: Sequence[Step] | None = None) -> Streaming:
    own = [Step(units=frozenset([i])) for i in range(len(sizes))] if steps is None else steps
    return decide_streaming(sizes, own, fixed_bytes=fixed, memory_bytes=memory)


def test_everything_stays_if_it_fits() -> None:
    found = _decide([5, 5, 5], 18, fixed=3)
    assert (found.resident, found.resident_bytes, found.window_bytes) == (frozenset({0, 1, 2}), 18, 0)


def test_units_that_stay_are_spread_over_the_order() -> None:
    found = _decide([10] * 8, 50)
    assert found.reads_ahead
    assert found.resident == {0, 4, 2}
    assert (found.resident_bytes, found.window_bytes) == (30, 20)


def test_one_large_unit_stays_instead_of_widening_the_window() -> None:
    found = _decide([10, 10, 10, 10, 40], 70)
    assert found.resident == {0, 4}
    assert found.window_bytes == 20


def test_nothing_is_read_ahead_if_only_one_unit_fits() -> None:
    found = _decide([10, 10, 10], 15, fixed=2)
    assert not found.reads_ahead
    assert not found.resident
    assert (found.smallest_bytes, found.window_bytes) == (12, 13)


def test_experts_stay_only_with_everything_else() -> None:
    steps = [
        Step(units=frozenset([0])),
        *(Step(units=frozenset([0, i]), optional=True) for i in (1, 2, 3)),
        Step(units=frozenset([4])),
    ]
    found = _decide([10, 10, 10, 10, 10], 45, steps=steps)
    assert found.resident == {0, 4}
    assert found.window_bytes == 25


def test_weights_of_which_only_rows_are_read_take_no_room() -> None:
    found = _decide([1000, 10, 10, 10], 20, steps=[Step(units=frozenset([i])) for i in (1, 2, 3)])
    assert found.fits(20)
    assert not found.resident


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    fixed=st.integers(0, 20),
    memory=st.integers(0, 300),
)
def test_memory_is_kept_and_the_smallest_works(sizes: list[int], fixed: int, memory: int) -> None:
    found = _decide(sizes, memory, fixed=fixed)
    if found.fits(memory):
        assert found.resident_bytes + found.window_bytes <= memory
        streamed = [size for i, size in enumerate(sizes) if i not in found.resident]
        assert max(streamed, default=0) <= found.window_bytes
        ahead = pairwise([*streamed, *streamed[:1]]) if found.reads_ahead and len(streamed) > 1 else ()
        assert max(map(sum, ahead), default=0) <= found.window_bytes
    smallest = _decide(sizes, found.smallest_bytes, fixed=fixed)
    assert smallest.fits(found.smallest_bytes)
    assert smallest.resident_bytes + smallest.window_bytes <= found.smallest_bytes
    assert found.smallest_bytes == 0 or not _decide(sizes, found.smallest_bytes - 1, fixed=fixed).fits(
        found.smallest_bytes - 1
    )


@given(st.lists(st.integers(0, 100), max_size=20), st.integers(0, 1000))
def test_as_many_units_rest_as_fit(sizes: list[int], room: int) -> None:
    chosen = choose_resting(sizes, room)
    left = room - sum(sizes[number] for number in chosen)
    assert left >= 0
    assert all(size > left for number, size in enumerate(sizes) if number not in chosen)


def test_resting_units_are_spread_evenly() -> None:
    assert choose_resting([10] * 8, 40) == {0, 2, 4, 6}
