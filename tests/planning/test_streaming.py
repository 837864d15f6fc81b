"""The weights of a streamed model that stay in memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.planning.streaming import Step, Streaming, choose_resting, decide_streaming


def _decide(sizes: Sequence[int], memory: int, *, fixed: int = 0, steps: Sequence[Step] | None = None) -> Streaming:
    own = [Step(units=frozenset([i])) for i in range(len(sizes))] if steps is None else steps
    return decide_streaming(sizes, own, fixed_bytes=fixed, memory_bytes=memory)


@pytest.mark.parametrize(
    ("sizes", "memory", "fixed", "resident", "window", "ahead"),
    [
        pytest.param([5, 5, 5], 18, 3, {0, 1, 2}, 0, False, id="everything stays if it fits"),
        pytest.param([10] * 8, 50, 0, {0, 4, 2}, 20, True, id="what stays is spread over the order"),
        pytest.param([10, 10, 10, 10, 40], 70, 0, {0, 4}, 20, True, id="one large unit stays, for a narrow window"),
        pytest.param([10, 10, 10], 15, 2, set(), 13, False, id="only one unit fits"),
    ],
)
def test_what_stays(sizes: list[int], memory: int, fixed: int, resident: set[int], window: int, ahead: bool) -> None:
    found = _decide(sizes, memory, fixed=fixed)
    assert (set(found.resident), found.window_bytes, found.reads_ahead) == (resident, window, ahead)
    assert found.resident_bytes == fixed + sum(sizes[number] for number in resident)


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
