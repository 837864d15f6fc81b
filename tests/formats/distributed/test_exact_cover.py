"""Exact covers of a box: a minimal case for each way to miss or repeat an element."""

from __future__ import annotations

from sluice.formats.distributed.exact_cover import cut_dimensions

LEFT, RIGHT = ((0, 0), (4, 2)), ((0, 2), (4, 3))


def test_only_dimensions_that_a_box_does_not_span_are_cut() -> None:
    assert cut_dimensions((4, 5), [LEFT, RIGHT]) == [1]
    assert cut_dimensions((4, 5), [((0, 0), (4, 5))]) == []
    assert cut_dimensions((4, 5), [LEFT, ((0, 2), (3, 3))]) == [0, 1]
