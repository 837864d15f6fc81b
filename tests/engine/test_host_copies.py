"""Copies of unaligned elements, compared with copies of the same bytes aligned."""

from __future__ import annotations

import ctypes

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice import _defaults as defaults
from sluice.engine.host_copies import StridedBytes, copy_in_pieces
from sluice.records.geometry import span_elements
from support.oracles import bits
from support.watching import watch

DTYPES = [torch.int16, torch.float32, torch.bfloat16, torch.complex64, torch.float64]


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw sizes and strides of a box: dense, with gaps, transposed, or with repeated elements."""
    sizes = draw(st.lists(st.integers(1, 7), max_size=4))
    steps, step = [], 1
    for size in sizes:
        steps.append(0 if draw(st.integers(0, 9)) == 0 else step)
        step *= size + draw(st.sampled_from([0, 0, 1, 5]))
    order = draw(st.permutations(range(len(sizes))))
    return tuple(sizes[i] for i in order), tuple(steps[i] for i in order)


@given(
    layout=layouts(), dtype=st.sampled_from(DTYPES), shift=st.integers(1, 7), limit=st.sampled_from([16, 40, 100, 4096])
)
def test_any_box_at_any_address(
    layout: tuple[tuple[int, ...], tuple[int, ...]], dtype: torch.dtype, shift: int, limit: int
) -> None:
    shape, stride = layout
    nbytes = span_elements(shape, stride) * dtype.itemsize
    data = torch.arange(nbytes + 8, dtype=torch.uint8)
    target, expected = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(defaults, "MOVED_BYTES", limit)
        copy_in_pieces(target, StridedBytes(data[shift : shift + nbytes], dtype, shape, stride))
    copy_in_pieces(expected, StridedBytes(data[shift : shift + nbytes].clone(), dtype, shape, stride))
    assert bits(target) == bits(expected)


def test_a_cast_of_many_pieces_into_every_second_column() -> None:
    values = torch.randn(700, 300)
    data = torch.cat([torch.zeros(3, dtype=torch.uint8), values.view(torch.uint8).flatten()])
    target = torch.zeros(700, 600, dtype=torch.bfloat16)
    source = StridedBytes(data[3:], torch.float32, (700, 300), (300, 1))
    assert not source.aligned
    copy_in_pieces(target[:, ::2], source)
    assert torch.equal(target[:, ::2], values.bfloat16())
    assert not target[:, 1::2].any()


def test_misaligned_copies_of_a_thread_move_through_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    destinations: list[int] = []
    watch(monkeypatch, ctypes, "memmove", lambda to, *_: destinations.append(to))
    stored = torch.arange(4000, dtype=torch.uint8)
    for begin in (1, 2, 3):
        target = torch.empty(900)
        raw = stored[begin : begin + target.nbytes]
        copy_in_pieces(target, StridedBytes(raw, torch.float32, (900,), (1,)))
        assert torch.equal(target.view(torch.uint8), raw)
    assert len(destinations) == 3
    assert len(set(destinations)) == 1  # memory of each copy was kept by malloc: 30 MiB a thread after 300 copies
