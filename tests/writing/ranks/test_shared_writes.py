"""Runs compared with the positions of the elements that a rank holds, for every rank of every mesh."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.sharding.regions import Region, Sharding, Split, region_of
from sluice.writing.ranks import shared_writes as module
from sluice.writing.ranks.shared_writes import Runs


@st.composite
def shardings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Sharding]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    splits = (
        st.none() | st.builds(Split, dim=st.integers(0, len(shape) - 1), pieces=st.integers(1, 3))
        if shape
        else st.none()
    )
    placements = tuple(draw(splits) for _ in mesh)
    coordinates = itertools.product(*map(range, mesh))
    return shape, [Sharding(mesh=mesh, coordinate=at, placements=placements) for at in coordinates]


def positions(runs: Runs, first: int, last: int) -> list[int]:
    return [
        element
        for starts, counts in runs.within(first, last)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        for element in range(start, start + count)
    ]


def expected_positions(shape: tuple[int, ...], region: Region) -> list[int]:
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    selected = [[index for start, stop in intervals for index in range(start, stop)] for intervals in region]
    chosen: list[int] = (numbers[np.ix_(*selected)] if shape else numbers).reshape(-1).tolist()
    return chosen


@given(shardings(), st.data())
def test_runs_are_the_elements_of_a_rank_in_its_own_order(
    layout: tuple[tuple[int, ...], list[Sharding]], data: st.DataObject
) -> None:
    shape, ranks = layout
    for sharding in ranks:
        region = region_of(shape, sharding)
        runs, expected = Runs(shape, region), expected_positions(shape, region)
        assert positions(runs, 0, runs.elements) == expected
        first = data.draw(st.integers(0, runs.elements))
        last = data.draw(st.integers(first, runs.elements))
        assert positions(runs, first, last) == expected[first:last]


def test_columns_have_a_run_for_each_row_and_rows_have_one() -> None:
    (columns,) = Runs((1000, 8), (((0, 1000),), ((2, 4),))).within(0, 2000)
    assert (len(columns[0]), set(columns[1].tolist())) == (1000, {2})
    (rows,) = Runs((1000, 8), (((250, 500),), ((0, 8),))).within(0, 2000)
    assert (rows[0].tolist(), rows[1].tolist()) == ([2000], [2000])


def test_many_runs_come_in_batches_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 3)
    runs = Runs((10, 2), (((0, 10),), ((1, 2),)))
    assert [len(starts) for starts, _ in runs.within(2, 10)] == [3, 3, 2]
    assert positions(runs, 2, 10) == list(range(5, 20, 2))
