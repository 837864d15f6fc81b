"""Slices of views, and entries that are assembled from parts: whole, sliced, shared and cast, compared with torch."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.entries.assembly import join
from sluice.entries.slicing import KeyItem, slice_entry, slice_view
from sluice.records import NO_STORAGE, Entry, Part, elements_of
from sluice.records.geometry import contiguous_stride
from support.plans import entry_of, keys_of, load, request

MIB = 1 << 20


def assembled(shape: tuple[int, ...], parts: list[tuple[torch.Tensor, tuple[int, ...]]]) -> Entry:
    return Entry(
        elements=elements_of("float32"),
        shape=shape,
        stride=contiguous_stride(shape),
        storage=NO_STORAGE,
        parts=tuple(Part(entry=entry_of(tensor, i), start=start) for i, (tensor, start) in enumerate(parts)),
    )


@st.composite
def grids(draw: st.DrawFn) -> tuple[torch.Tensor, list[tuple[torch.Tensor, tuple[int, ...]]]]:
    """A tensor, and chunks that cover it, each with its own storage and strides."""
    shape = draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))
    whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
    cuts = [sorted({0, size, *draw(st.sets(st.integers(0, size), max_size=2))}) for size in shape]
    parts = []
    for box in itertools.product(*(itertools.pairwise(edges) for edges in cuts)):
        chunk = whole[tuple(slice(first, end) for first, end in box)]
        order = draw(st.permutations(range(len(shape))))
        back = [order.index(dim) for dim in range(len(shape))]
        parts.append((chunk.permute(order).contiguous().permute(back), tuple(first for first, _ in box)))
    return whole, draw(st.permutations(parts))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=grids(), data=st.data())
def test_any_slice_of_any_chunks_equals_torchs(
    tmp_path: Path, made: tuple[torch.Tensor, list[tuple[torch.Tensor, tuple[int, ...]]]], data: st.DataObject
) -> None:
    whole, parts = made
    entry = assembled(tuple(whole.shape), parts)
    key = data.draw(keys_of(whole))
    wanted = [request("whole", entry), request("slice", slice_entry(entry, key))]
    full, part = load(tmp_path / "f", [tensor for tensor, _ in parts], wanted)
    assert torch.equal(full, whole)
    assert torch.equal(part, whole[key])


def test_a_slice_keeps_only_the_parts_that_it_touches() -> None:
    entry = assembled((4, 4), [(torch.zeros(2, 4), (0, 0)), (torch.zeros(2, 4), (2, 0))])
    assert slice_entry(entry, 3).storages == (1,)
    assert slice_entry(entry, slice(0, 2)).storages == (0,)
    assert slice_entry(entry, (slice(None), 1)).storages == (0, 1)
    empty = slice_entry(entry, slice(2, 2))
    assert (empty.shape, empty.parts, empty.storage) == ((0, 4), (), 0)


@pytest.mark.parametrize("share", [False, True])
def test_two_names_of_one_assembled_entry(tmp_path: Path, share: bool) -> None:
    halves = [torch.arange(3.0), torch.arange(3.0, 6.0)]
    entry = assembled((6,), [(halves[0], (0,)), (halves[1], (3,))])
    first, second = entry.parts
    other = replace(entry, parts=(replace(second, start=(0,)), replace(first, start=(3,))))
    one, two, swapped = load(
        tmp_path / "f", halves, [request("a", entry), request("b", entry), request("c", other)], share=share
    )
    assert torch.equal(one, torch.arange(6.0))
    assert torch.equal(two, one)
    assert (one.data_ptr() == two.data_ptr()) is share
    assert torch.equal(swapped, torch.cat([halves[1], halves[0]]))


@pytest.mark.parametrize(("shapes", "dim"), [([(), ()], 0), ([(3, 4), (3,)], 1)])
def test_what_lacks_the_dimension_is_not_joined(shapes: list[tuple[int, ...]], dim: int) -> None:
    with pytest.raises(ValueError, match=f"has no dimension {dim}"):
        join([entry_of(torch.zeros(shape), number) for number, shape in enumerate(shapes)], dim)


positions = st.integers(-7, 7)
slices = st.builds(slice, st.none() | positions, st.none() | positions, st.none() | st.integers(1, 4))
keys = st.lists(st.one_of(positions, slices, st.none(), st.just(...)), max_size=5)
one_ellipsis = keys.filter(lambda key: sum(one is ... for one in key) <= 1)  # torch accepts several, numpy does not


@given(st.lists(st.integers(0, 6), max_size=4), one_ellipsis)
def test_views_are_torchs(shape: list[int], selections: list[KeyItem]) -> None:
    key = tuple(selections)
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape)
    try:
        expected = tensor[key]
    except IndexError:
        with pytest.raises(IndexError):
            slice_view(tuple(shape), tensor.stride(), key)
        return
    new_shape, stride, start = slice_view(tuple(shape), tensor.stride(), key)
    assert new_shape == expected.shape
    assert torch.equal(tensor.as_strided(new_shape, stride, start) if tensor.numel() else expected, expected)


@pytest.mark.parametrize("key", [[0, 1], True, "a", 1.0, torch.tensor([0])])
def test_selections_that_need_data_and_negative_steps_are_refused(key: object) -> None:
    with pytest.raises(TypeError, match="only with integers, slices"):
        slice_view((3,), (1,), key)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="positive"):  # as in torch
        slice_view((3,), (1,), slice(None, None, -1))
