"""Where tensors are in their storages."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.modules.regions import region_of

_TABLE = torch.zeros(4, 3, 8)
_SLICES = st.builds(
    lambda start, size, step: slice(start, start + size, step),
    st.integers(0, 3),
    st.integers(1, 5),
    st.integers(1, 3),
)


def places(tensor: torch.Tensor) -> set[int]:
    numbers = torch.arange(_TABLE.numel()).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return set(numbers.flatten().tolist())


@given(one=st.tuples(_SLICES, _SLICES, _SLICES), other=st.tuples(_SLICES, _SLICES, _SLICES))
def test_overlaps_are_never_missed_and_slices_of_one_step_are_told_apart(
    one: tuple[slice, slice, slice], other: tuple[slice, slice, slice]
) -> None:
    first, second = _TABLE[one], _TABLE[other].transpose(0, 2)
    if not first.numel() or not second.numel():
        return
    common = bool(places(first) & places(second))
    assert common <= region_of(first).overlaps(region_of(second))
    if [part.step for part in (*one, *other)] == [1] * 6:
        assert common == region_of(first).overlaps(region_of(second))


def test_columns_do_not_overlap() -> None:
    one, other = region_of(_TABLE[:, :, ::2]), region_of(_TABLE[:, :, 1::2])
    assert not one.overlaps(other)
    assert one.overlaps(region_of(_TABLE[:, 1:, ::2]))
    assert one.overlaps(region_of(_TABLE.view(torch.int32)))
