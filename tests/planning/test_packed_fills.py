"""Fills from packed elements: every view of them, put together from its fills."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._errors import UnsupportedError
from sluice.entries.assembly import permute
from sluice.entries.slicing import slice_entry
from sluice.planning.packed_fills import packed_fills
from sluice.records import Elements, Entry, Fill, Packing
from sluice.records.geometry import contiguous_stride, span_elements

PACK = 4
PACKING = Packing(name="test", elements=PACK, nbytes=3)


def entry(shape: tuple[int, ...]) -> Entry:
    return Entry(Elements(dtype="float32", packing=PACKING), shape, contiguous_stride(shape), 0)


def filled(view: Entry, stride: tuple[int, ...]) -> list[int]:
    """Return the target: the number of the stored element at each position; each is written once."""
    target = torch.full((span_elements(view.shape, stride),), -1)
    for fill in packed_fills(view, 0, stride, 0, 0):
        packing = fill.elements.packing
        assert packing is not None
        assert fill.offset % packing.nbytes == 0
        assert 0 <= packing.first < packing.first + packing.taken <= PACK
        _write(target, fill, packing)
    return target.tolist()


def _write(target: torch.Tensor, fill: Fill, packing: Packing) -> None:
    for pack in np.ndindex(fill.shape):
        at = fill.offset // packing.nbytes + sum(i * step for i, step in zip(pack, fill.source_stride, strict=True))
        to = fill.target_start + sum(i * step for i, step in zip(pack, fill.target_stride, strict=True))
        for number in range(packing.taken):
            place = to + number * packing.target_step
            assert target[place] == -1
            target[place] = at * PACK + packing.first + number


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_views_are_put_together(data: st.DataObject) -> None:
    outer = tuple(data.draw(st.lists(st.integers(1, 3), max_size=2)))
    shape = (*outer, PACK * data.draw(st.integers(1, 4)))
    key = tuple(
        data.draw(st.one_of(st.integers(0, size - 1), st.slices(size).filter(lambda key: (key.step or 1) > 0)))
        for size in shape
    )
    view = slice_entry(entry(shape), key)
    elements = torch.arange(prod(shape)).view(shape)[key]
    order = data.draw(st.permutations(range(len(view.shape))))
    view, elements = permute(view, order), elements.permute(order)
    if view.numel:
        assert filled(view, contiguous_stride(view.shape)) == elements.flatten().tolist()


def test_a_view_of_rows_is_one_fill() -> None:
    (fill,) = packed_fills(slice_entry(entry((6, 8)), slice(1, 5)), 10, (8, 1), 2, 100)
    assert (fill.file, fill.offset, fill.target_start) == (2, 100 + 2 * 3, 10)
    assert (fill.shape, fill.source_stride, fill.target_stride) == ((8,), (1,), (4,))


def test_columns_take_a_part_of_their_first_and_last_packs() -> None:
    fills = list(packed_fills(slice_entry(entry((6, 16)), (slice(None), slice(2, 13))), 0, (11, 1), 0, 0))
    taken = [(fill.elements.packing.first, fill.elements.packing.taken) for fill in fills if fill.elements.packing]
    assert taken == [(2, 2), (0, 4), (0, 1)]


def test_too_many_parts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(defaults, "PACK_PARTS", 3)
    scattered = replace(entry((1,)), shape=(4,), stride=(3,))
    with pytest.raises(UnsupportedError, match="4 different parts of packs of 4 elements") as caught:
        list(packed_fills(scattered, 0, (1,), 0, 0))
    assert "whole rows" in caught.value.advice
