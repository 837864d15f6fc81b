"""Storages of a save: needed elements, and tensors that share stored bytes."""

from __future__ import annotations

import pytest
import torch

from sluice._errors import SaveError
from sluice.writing.items import collect_spans, named_tensors, storage_key


def test_a_span_covers_all_views_of_a_storage_and_no_more() -> None:
    base = torch.arange(100.0)
    other = torch.arange(3.0)
    spans = collect_spans([base[20:30], base[40:60:5], other, base[:0]])
    assert [(span.start, span.end) for span in spans.values()] == [(0, 56), (0, 3)]
    assert list(spans) == [storage_key(base), storage_key(other)]
    (span,) = collect_spans([base[20:30], base[40:60:5]]).values()
    assert torch.equal(span.flat(), base[20:56])


def test_a_conjugate_view_has_stored_bytes_of_its_own() -> None:
    base = torch.zeros(4, dtype=torch.complex64)
    assert storage_key(base) == storage_key(base[1:])
    assert len({storage_key(base), storage_key(base.conj()), storage_key(base.conj().imag)}) == 3


def test_views_of_one_storage_in_different_dtypes_are_refused() -> None:
    base = torch.arange(4.0)
    with pytest.raises(SaveError, match=r"share one storage; expected torch\.float32; found torch\.int32"):
        collect_spans([base, base.view(torch.int32)])


def test_names_are_dotted_paths() -> None:
    one, two = torch.ones(1), torch.ones(2)
    assert named_tensors({"a": {"b": one}, "c": [two, 3]}) == {"a.b": one, "c.0": two}
    with pytest.raises(SaveError, match="the same dotted name"):
        named_tensors({"a": {"b": one}, "a.b": two})
