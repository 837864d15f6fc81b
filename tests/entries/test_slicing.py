from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.entries.slicing import KeyItem, slice_view

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
def test_selections_that_need_data_are_refused(key: object) -> None:
    with pytest.raises(TypeError, match="only with integers, slices"):
        slice_view((3,), (1,), key)  # type: ignore[arg-type]


def test_negative_steps_are_refused_as_in_torch() -> None:
    with pytest.raises(ValueError, match="positive"):
        slice_view((3,), (1,), slice(None, None, -1))
