"""Exact covers of a box: a minimal case for each way to miss or repeat an element."""

from __future__ import annotations

import pytest

from sluice.formats.distributed.exact_cover import Box, Miscount, cut_dimensions, first_miscount

LEFT, RIGHT = ((0, 0), (4, 2)), ((0, 2), (4, 3))


def test_halves_cover_the_whole_in_any_order() -> None:
    assert first_miscount((4, 5), [LEFT, RIGHT]) is None
    assert first_miscount((4, 5), [RIGHT, LEFT]) is None


@pytest.mark.parametrize(
    ("boxes", "expected"),
    [
        ([LEFT], Miscount((0, 2), 0)),
        ([RIGHT], Miscount((0, 0), 0)),
        ([LEFT, LEFT, RIGHT], Miscount((0, 0), 2)),
        ([LEFT, ((0, 1), (4, 4))], Miscount((0, 1), 2)),
        ([LEFT, ((0, 2), (3, 3))], Miscount((3, 2), 0)),
    ],
)
def test_the_first_element_in_index_order_is_reported(boxes: list[Box], expected: Miscount) -> None:
    assert first_miscount((4, 5), boxes) == expected


def test_a_gap_that_an_overlap_of_the_same_size_balances() -> None:
    assert first_miscount((3,), [((0,), (2,)), ((1,), (1,))]) == Miscount((1,), 2)


def test_only_dimensions_that_a_box_does_not_span_are_cut() -> None:
    assert cut_dimensions((4, 5), [LEFT, RIGHT]) == [1]
    assert cut_dimensions((4, 5), [((0, 0), (4, 5))]) == []
    assert cut_dimensions((4, 5), [LEFT, ((0, 2), (3, 3))]) == [0, 1]


def test_a_scalar_is_covered_by_one_box() -> None:
    assert first_miscount((), [((), ())]) is None
    assert first_miscount((), []) == Miscount((), 0)
    assert first_miscount((), [((), ()), ((), ())]) == Miscount((), 2)
