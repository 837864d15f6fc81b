"""Indices of sparse tensors are accepted and refused as by torch's ``check_invariants``."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sluice import FormatError
from sluice.reading import sparse_indices as _sparse_indices
from sluice.reading.sparse_indices import check_indices, pieces_of
from sluice.records import Entry, Sparse, elements_of
from support.plans import entry_of

pytestmark = pytest.mark.filterwarnings("ignore:Sparse")


def agrees(
    layout: str, shape: tuple[int, ...], indices: list[torch.Tensor], values: torch.Tensor, *, coalesced: bool = False
) -> None:
    """Assert that torch and sluice both accept or both refuse a tensor."""
    held = tuple(entry_of(each, 0) for each in indices)
    made = Sparse(layout=layout, indices=held, values=entry_of(values, 0), coalesced=coalesced)
    entry = Entry(elements=elements_of("float32"), shape=shape, stride=(), storage=0, composite=made)
    try:
        if layout == "sparse_coo":
            torch.sparse_coo_tensor(indices[0], values, shape, is_coalesced=coalesced, check_invariants=True)
        else:
            how: Any = {"layout": getattr(torch, layout), "check_invariants": True}
            torch.sparse_compressed_tensor(indices[0], indices[1], values, shape, **how)
        fine = True
    except RuntimeError:
        fine = False
    lines = indices[0] if layout == "sparse_coo" else indices
    if fine:
        check_indices(entry, [pieces_of(line) for line in lines])
    else:
        with pytest.raises(FormatError):
            check_indices(entry, [pieces_of(line) for line in lines])


@pytest.fixture(autouse=True, params=[3, 32_767])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_sparse_indices, "CAST_PIECE_ELEMENTS", request.param)


@given(data=st.data())
def test_compressed(data: st.DataObject) -> None:
    layout = data.draw(st.sampled_from(["sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"]))
    rows, columns, batch = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    count = data.draw(st.integers(0, 8))
    starts, plain = [], []
    for _ in range(batch):
        inner = sorted(data.draw(st.lists(st.integers(0, count), min_size=max(rows - 1, 0), max_size=max(rows - 1, 0))))
        line = [0, *inner, count][: rows + 1]
        each = [i for a, b in itertools.pairwise(line) for i in range(b - a)]
        each += [0] * (count - len(each))
        starts += line
        plain += each
    for numbers in (starts, plain):  # mostly valid, with a few changes
        for _ in range(data.draw(st.integers(0, 2)) if numbers else 0):
            numbers[data.draw(st.integers(0, len(numbers) - 1))] = data.draw(st.integers(-1, 9))
    kind = data.draw(st.sampled_from([torch.int32, torch.int64]))
    lead = (batch,) if batch > 1 else ()
    block = (2, 3) if layout in {"sparse_bsr", "sparse_bsc"} else ()
    size = (rows, columns) if layout in {"sparse_csr", "sparse_bsr"} else (columns, rows)
    size = (size[0] * 2, size[1] * 3) if block else size
    indices = [
        torch.tensor(starts, dtype=kind).reshape(*lead, rows + 1),
        torch.tensor(plain, dtype=kind).reshape(*lead, count),
    ]
    agrees(layout, (*lead, *size), indices, torch.ones(*lead, count, *block))


@given(data=st.data())
def test_coordinates(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    count = data.draw(st.integers(0, 8))
    rows = [
        [data.draw(st.integers(-1 if data.draw(st.integers(0, 9)) == 0 else 0, size - 1)) for _ in range(count)]
        for size in shape
    ]
    indices = torch.tensor(rows, dtype=torch.int64).reshape(len(shape), count)
    agrees("sparse_coo", shape, [indices], torch.ones(count), coalesced=data.draw(st.booleans()))
