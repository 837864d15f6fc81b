"""Growth of memory while code of the model copies finished tensors."""

from __future__ import annotations

import pytest

from sluice.planning.later_copies import growth_of_copies

MIB = 1 << 20


@pytest.mark.parametrize(
    ("copies", "growth"),
    [
        ([], 0),
        ([(4 * MIB, 5 * MIB)], 5 * MIB),  # the old one is freed when the copy is complete
        ([(4 * MIB, 5 * MIB), (6 * MIB, 6 * MIB), (4 * MIB, 4 * MIB)], 6 * MIB + MIB),
        ([(100, 300), (0, 200)], 500),  # small ones share an arena with tensors that stay
    ],
)
def test_large_tensors_are_freed_one_after_the_other(copies: list[tuple[int, int]], growth: int) -> None:
    assert growth_of_copies(iter(copies)) == growth
