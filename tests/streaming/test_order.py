"""The blocks that are expected after a call."""

from __future__ import annotations

import random
from itertools import islice

from sluice.streaming.order import CallOrder


def _after(order: CallOrder, *calls: int) -> list[int]:
    for call in calls:
        order.note(call)
    return list(islice(order.upcoming(), 5))


def test_the_first_call_follows_the_definition_and_wraps_around() -> None:
    assert _after(CallOrder([0, 1, 2, 3], 8)) == [0, 1, 2, 3]
    assert _after(CallOrder([0, 1, 2, 3], 8), 0, 1) == [2, 3, 0, 1]


def test_one_step_back_in_the_first_call_is_no_backward_pass() -> None:
    order = CallOrder([0, 1, 2, 3], 8)
    assert _after(order, 0, 2) == [1, 3, 0, 1, 2]
    assert _after(order, 1) == [2, 3, 0, 1]
    order.note(3)
    order.note(3, part=True)
    assert list(islice(order.upcoming(), 5)) == [2, 1, 0, 0, 1]
    assert _after(order, 2)[:2] == [1, 0]  # activations that are computed again


def test_later_calls_follow_the_call_before() -> None:
    order = CallOrder([0, 1, 2, 3], 8)
    assert _after(order, 3, 1, 0, 3, 1)[:3] == [0, 3, 1]
    assert _after(order, 2) == [3, 0, 1, 2]  # never seen after 1: the definition again


def test_a_repeated_block_is_told_from_its_neighbours() -> None:
    order = CallOrder([0, 1, 2], 8)
    assert _after(order, 0, 1, 1, 2, 0, 1)[:2] == [1, 2]


def test_old_calls_are_forgotten() -> None:
    order = CallOrder([0, 1], 8)
    _after(order, 7, 8, *[0, 1] * 40, 7)
    assert _after(order, 8) == [0, 1]


def test_what_is_kept_and_expected_is_bounded_with_many_experts() -> None:
    order, choose = CallOrder([0], 60), random.Random(5)
    calls = [choose.randrange(1, 60) for _ in range(5000)]
    _after(order, *calls[:-400], 0, 0, *calls[-400:], 0, 0)
    assert list(order.upcoming()) == calls[-400:-340]
    assert len(order._last) <= 2 * 8 * 60


def test_the_first_backward_pass_goes_against_the_definition() -> None:
    order = CallOrder([0, 1, 2, 3], 8, returns=True)
    assert _after(order, 0, 1, 2) == [3, 3, 2, 1, 0]
    assert _after(order, 3, 3) == [2, 1, 0, 0, 1]
