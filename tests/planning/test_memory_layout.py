"""Fills from packed elements: every view of them, put together from its fills."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice._errors import UnsupportedError
from sluice.entries.assembly import permute
from sluice.entries.slicing import slice_entry
from sluice.planning.memory_layout import packed_fill
from sluice.records import Elements, Entry, Packing
from sluice.records.geometry import contiguous_stride, span_elements

PACK = 4
PACKING = Packing(name="test", elements=PACK, nbytes=3)


def entry(shape: tuple[int, ...]) -> Entry:
    return Entry(Elements(dtype="float32", packing=PACKING), shape, contiguous_stride(shape), 0)


def filled(view: Entry, stride: tuple[int, ...]) -> list[int]:
    """Return the target: the number of the stored element at each position; each is written once."""
    target = torch.full((span_elements(view.shape, stride),), -1)
    fill = packed_fill(view, 0, stride, 0, 0)
    packing = fill.elements.packing
    assert packing is not None
    assert fill.offset % packing.nbytes == 0
    for pack in np.ndindex(fill.shape):
        at = fill.offset // packing.nbytes + sum(i * step for i, step in zip(pack, fill.source_stride, strict=True))
        to = fill.target_start + sum(i * step for i, step in zip(pack, fill.target_stride, strict=True))
        for number in range(PACK):
            place = to + number * packing.target_step
            assert target[place] == -1
            target[place] = at * PACK + number
    return target.tolist()


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_views_are_put_together(data: st.DataObject) -> None:
    outer = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
    shape = (*outer, PACK * data.draw(st.integers(1, 4)))
    key = tuple(
        data.draw(st.one_of(st.integers(0, size - 1), st.slices(size).filter(lambda key: (key.step or 1) > 0)))
        for size in outer
    )
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, shape[-1] // PACK)] * 2)))
    key = (*key, slice(first * PACK, last * PACK))
    view = slice_entry(entry(shape), key)
    elements = torch.arange(prod(shape)).view(shape)[key]
    order = data.draw(st.permutations(range(len(view.shape))))
    view, elements = permute(view, order), elements.permute(order)
    if view.numel:
        assert filled(view, contiguous_stride(view.shape)) == elements.flatten().tolist()


@pytest.mark.parametrize("key", [slice(2, 12), slice(0, 13), slice(0, 16, 2), slice(3, 4)])
def test_parts_of_packs_are_refused(key: slice) -> None:
    with pytest.raises(UnsupportedError, match="parts of packs of 4 elements") as caught:
        packed_fill(slice_entry(entry((6, 16)), (slice(None), key)), 0, (11, 1), 0, 0)
    assert "convert the file" in caught.value.advice
