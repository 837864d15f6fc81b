from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice.records.geometry import (
    CopyPiece,
    collapse,
    contiguous_stride,
    cut,
    is_dense,
    round_down,
    round_up,
    span_elements,
    split_evenly,
)

ITEM = 4
shapes = st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def layouts(draw: st.DrawFn, *, smallest: int = 0) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw a shape and strides: dense in any order, with gaps, overlapping or expanded."""
    shape = tuple(draw(st.lists(st.integers(smallest, 5), min_size=0, max_size=4)))
    dense = contiguous_stride(shape)
    order = draw(st.permutations(range(len(shape))))
    if draw(st.booleans()):
        permuted = torch.empty(tuple(shape[i] for i in order)).permute(*np.argsort(order).tolist()) if shape else None
        return shape, tuple(permuted.stride()) if permuted is not None else dense
    return shape, tuple(draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape))))


@given(st.integers(0, 10**6), st.integers(1, 5000))
def test_rounding_brackets_the_value(value: int, multiple: int) -> None:
    assert round_down(value, multiple) <= value <= round_up(value, multiple)
    assert round_down(value, multiple) % multiple == round_up(value, multiple) % multiple == 0
    assert round_up(value, multiple) - round_down(value, multiple) in {0, multiple}


@given(shapes)
def test_contiguous_stride_is_torchs(shape: tuple[int, ...]) -> None:
    assert contiguous_stride(shape) == torch.empty(shape).stride()


@given(layouts())
def test_density_and_span_are_those_of_the_elements(layout: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, stride = layout
    offsets = [sum(i * s for i, s in zip(index, stride, strict=True)) for index in np.ndindex(*shape)]
    assert is_dense(shape, stride) == (sorted(offsets) == list(range(len(offsets))))
    assert span_elements(shape, stride) == max(offsets, default=-1) + 1


@given(layouts(smallest=1))
def test_a_dense_copy_collapses_to_one_run(layout: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, stride = layout
    collapsed = collapse(shape, stride, stride)
    if is_dense(shape, stride):
        assert collapsed == ((math.prod(shape),), (1,), (1,))
    assert math.prod(collapsed[0]) == math.prod(shape)


@st.composite
def copies(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    shape, stride = draw(layouts(smallest=1))
    return shape, stride, draw(st.integers(0, 50))


@given(copies(), st.integers(1, 40), st.integers(0, 60))
def test_pieces_copy_every_element_once_within_the_limit(
    copy: tuple[tuple[int, ...], tuple[int, ...], int], limit_items: int, gap_bytes: int
) -> None:
    shape, stride, start = copy
    data = np.arange(start // ITEM + span_elements(shape, stride) + 1, dtype=np.int32)
    expected = np.lib.stride_tricks.as_strided(data[start // ITEM :], shape, [s * ITEM for s in stride])
    collapsed = collapse(shape, stride, contiguous_stride(shape))
    first = start // ITEM * ITEM
    whole = CopyPiece(first, span_elements(collapsed[0], collapsed[1]) * ITEM, *collapsed, 0)
    result = np.full(math.prod(shape), -1, dtype=np.int32)
    limit = limit_items * ITEM
    for piece in cut(whole, ITEM, limit_bytes=limit, gap_bytes=gap_bytes):
        assert piece.nbytes == span_elements(piece.shape, piece.source_stride) * ITEM <= limit
        assert first <= piece.start_byte
        assert piece.start_byte + piece.nbytes <= first + whole.nbytes
        for index in np.ndindex(*piece.shape):
            source = piece.start_byte // ITEM + sum(i * s for i, s in zip(index, piece.source_stride, strict=True))
            target = piece.target_start + sum(i * s for i, s in zip(index, piece.target_stride, strict=True))
            assert result[target] == -1, "an element was copied twice"
            result[target] = data[source]
    assert (result == np.ascontiguousarray(expected).ravel()).all()


def test_wide_gaps_are_never_part_of_a_piece() -> None:
    column = CopyPiece(0, (9 * 1000 + 1) * ITEM, (10,), (1000,), (1,), 0)
    pieces = list(cut(column, ITEM, limit_bytes=1 << 20, gap_bytes=100))
    assert [(piece.start_byte, piece.nbytes) for piece in pieces] == [(i * 4000, 4) for i in range(10)]


def test_copies_of_the_same_run_are_cut_at_the_same_file_offsets_and_not_below_one_element() -> None:
    whole = list(cut(CopyPiece(0, 4096, (1024,), (1,), (1,), 0), ITEM, limit_bytes=1000, gap_bytes=0))
    part = list(cut(CopyPiece(400, 2000, (500,), (1,), (1,), 0), ITEM, limit_bytes=1000, gap_bytes=0))
    borders = {piece.start_byte for piece in whole}
    assert {piece.start_byte for piece in part[1:]} <= borders
    with pytest.raises(ValueError, match="cannot hold an element of 4 bytes"):
        list(cut(CopyPiece(0, 8, (2,), (1,), (1,), 0), ITEM, limit_bytes=3, gap_bytes=0))


@given(st.integers(0, 10**7), st.integers(1, 10**8), st.integers(4096, 1 << 24))
def test_even_parts_cover_the_range_in_order(start: int, nbytes: int, limit: int) -> None:
    parts = list(split_evenly(start, nbytes, limit_bytes=limit, align_bytes=4096))
    assert parts[0][0] == start
    assert sum(size for _, size in parts) == nbytes
    for (offset, size), (following, _) in pairwise(parts):
        assert offset + size == following
        assert following % 4096 == 0
    assert all(0 < size <= limit + 4096 for _, size in parts)
