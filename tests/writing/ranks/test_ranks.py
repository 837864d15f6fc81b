"""The parts of tensors that ranks write: every element once, for any mesh; replicas balanced; runs in their files."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice import SaveError
from sluice.sharding.regions import Region, Sharding, Split, region_of
from sluice.writing.ranks import shared_writes as module
from sluice.writing.ranks.division import HeldTensor, agreed_ties, boxes, divide
from sluice.writing.ranks.shared_writes import Runs

Held = dict[str, HeldTensor]


def held(shape: tuple[int, ...], region: Region, *, tied_to: str | None = None, dtype: str = "float32") -> HeldTensor:
    return HeldTensor(dtype=dtype, shape=shape, region=region, tied_to=tied_to)


def whole(*shape: int) -> HeldTensor:
    return held(shape, tuple(((0, size),) for size in shape))


def elements(region: Region, shape: tuple[int, ...]) -> list[int]:
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    found: list[int] = []
    for start, sizes in boxes(region):
        found += numbers[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))].reshape(-1).tolist()
    return found


def placements(shape: tuple[int, ...]) -> st.SearchStrategy[Split | None]:
    split = st.builds(Split, dim=st.integers(0, len(shape) - 1), pieces=st.integers(1, 3))
    return st.none() | split if shape else st.none()


@st.composite
def models(draw: st.DrawFn) -> list[Held]:
    """Ranks of a mesh of up to two dimensions that hold tensors in any layout, some on each row of the mesh only."""
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=2, max_size=2)))
    coordinates = list(itertools.product(*map(range, mesh)))
    ranks: list[Held] = [{} for _ in coordinates]
    for number in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        submesh = draw(st.booleans())  # a mesh of its own for each row: each row holds the whole tensor
        chosen = tuple(draw(placements(shape)) for _ in mesh[submesh:])
        for rank, at in zip(ranks, coordinates, strict=True):
            sharding = Sharding(mesh=mesh[submesh:], coordinate=at[submesh:], placements=chosen)
            rank[f"t{number}"] = held(shape, region_of(shape, sharding))
    return ranks


@given(models())
def test_every_element_is_written_by_one_rank_that_holds_it(ranks: list[Held]) -> None:
    tensors = divide(ranks)
    for name, tensor in tensors.items():
        written: Counter[int] = Counter()
        for rank, own in enumerate(ranks):
            part = tensor.of(rank)
            if part is not None:
                assert part == own[name].region
                written.update(elements(part, tensor.shape))
        assert written == Counter(range(int(np.prod(tensor.shape, dtype=int))))


def test_ranks_write_what_all_hold_by_turns() -> None:
    shared = {name: whole(10) for name in "abcd"}
    tensors = divide([{"alone": whole(40)} | shared, shared, shared])
    assert [tuple(tensor.parts.values()) for tensor in tensors.values()] == [(0,), (0,), (1,), (2,), (0,)]


HALF = held((4, 2), (((0, 2),), ((0, 2),)))


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ([HALF, HALF], r"no rank holds element \[2, 0\]"),
        ([held((4, 2), ((), ()))], "no rank holds any element"),
        ([HALF, whole(4, 2)], r"element \[0, 0\] is in 2 different parts"),
        ([whole(4, 2), whole(4, 3)], "ranks 0 and 1 hold different tensors"),
        ([whole(4, 2), replace(whole(4, 2), dtype="bfloat16")], "ranks 0 and 1 hold different tensors"),
    ],
)
def test_parts_that_are_not_one_tensor_are_an_error(tensors: list[HeldTensor], problem: str) -> None:
    with pytest.raises(SaveError, match=problem) as caught:
        divide([{"w": tensor} for tensor in tensors])
    assert caught.value.tensor == "w"


def test_a_rank_without_elements_follows_the_ties_of_the_others() -> None:
    full, empty = ((0, 3),), ()
    first = {"a": held((3,), (full,), tied_to="a"), "b": held((3,), (full,), tied_to="a")}
    none = {"a": held((3,), (empty,)), "b": held((3,), (empty,))}
    untied = {"a": held((3,), (full,), tied_to="a"), "b": held((3,), (full,), tied_to="b")}
    assert agreed_ties([first, none]) == {"b": "a"}
    assert agreed_ties([first, untied]) == {}


@st.composite
def shardings(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Sharding]]:
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=4)))
    mesh = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    chosen = tuple(draw(placements(shape)) for _ in mesh)
    coordinates = itertools.product(*map(range, mesh))
    return shape, [Sharding(mesh=mesh, coordinate=at, placements=chosen) for at in coordinates]


def positions(runs: Runs, first: int, last: int) -> list[int]:
    return [
        element
        for starts, counts in runs.within(first, last)
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True)
        for element in range(start, start + count)
    ]


@given(shardings(), st.data())
def test_runs_are_the_elements_of_a_rank_in_its_own_order(
    layout: tuple[tuple[int, ...], list[Sharding]], data: st.DataObject
) -> None:
    shape, ranks = layout
    numbers = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for sharding in ranks:
        region = region_of(shape, sharding)
        selected = [[index for start, stop in intervals for index in range(start, stop)] for intervals in region]
        expected = (numbers[np.ix_(*selected)] if shape else numbers).reshape(-1).tolist()
        runs = Runs(shape, region)
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
