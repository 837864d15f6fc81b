"""Matching of entries to slots: ties, dtypes, memory, missing names, and the text of a mismatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES, is_castable, torch_dtype
from sluice._errors import MismatchError
from sluice.entries.patterns import device_of
from sluice.matching.match import Outline, Slot, finished_dtype, match
from sluice.records import Entry
from sluice.records.geometry import contiguous_stride
from support import plans
from support.dtypes import TORCH_DTYPES

CASTABLE = sorted(filter(is_castable, ITEM_BYTES))


def slot(*names: str, shape: tuple[int, ...] = (2, 3), device: str = "meta", **changes: Any) -> Slot:
    usual = {"parameter": True, "stride": contiguous_stride(shape), "dtype": "float32", "requires_grad": True}
    values: dict[str, Any] = {**usual, "in_place": device != "meta", **changes}
    return Slot(names=names, shape=shape, device=device, **values)


def entry(storage: int = 0, *, shape: tuple[int, ...] = (2, 3), **changes: Any) -> Entry:
    return plans.entry(shape, storage=storage, **changes)


def message(outline: Outline, entries: Mapping[str, Entry], **options: object) -> str:
    with pytest.raises(MismatchError) as caught:
        match(outline, entries, **options)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize("other", [entry(1), entry(0, start=6), entry(0, dtype="float16"), entry(0, stride=(1, 2))])
def test_tied_names_of_other_bytes_have_to_be_compared(other: Entry) -> None:
    outline = Outline(slots=(slot("first"), slot("embedding", "head", device="cpu")))
    found = match(outline, {"first": entry(7), "embedding": entry(), "head": other})
    ((position, request),) = found.comparisons
    assert found.requests[position].name == "embedding"
    assert found.requests[position].existing
    assert (request.name, request.entry, request.existing) == ("head", other, False)


def test_devices() -> None:
    outline = Outline(slots=(slot("a"), slot("b", device="cuda:1"), slot("c", device="cuda:2", in_place=False)))
    entries = dict.fromkeys("abc", entry())
    assert [r.device for r in match(outline, entries).requests] == ["cpu", "cuda:1", "cuda:2"]
    assert [r.device for r in match(outline, entries, placement={"": "cuda:0"}).requests] == ["cuda:0"] * 3
    placement = {"": "cpu", "blocks": "cuda:0", "blocks.1": "cuda:1"}
    names = ["head.weight", "blocks.0.weight", "blocks.1.weight", "blocks.10.weight", "blocks"]
    assert [device_of(name, placement) for name in names] == ["cpu", "cuda:0", "cuda:1", "cuda:0", "cuda:0"]
    assert device_of("head.weight", {"blocks": "cuda:0"}) is None


@given(st.sampled_from(sorted(ITEM_BYTES)), st.sampled_from(sorted(ITEM_BYTES)), st.sampled_from(CASTABLE))
def test_dtype_applies_to_real_floating_point_only(source: str, own: str, wanted: str) -> None:
    assert finished_dtype(source, own, None) == own
    assert finished_dtype(source, own, "auto") == source
    both = is_castable(source) and is_castable(own)
    assert finished_dtype(source, own, wanted) == (wanted if both else own)


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@given(st.sampled_from(sorted(TORCH_DTYPES)), st.sampled_from(sorted(TORCH_DTYPES)))
def test_casts_that_torch_has_are_accepted_and_others_named(source: str, own: str) -> None:
    outline = Outline(slots=(slot("w", dtype=own, requires_grad=False),))
    loses = source.startswith("complex") and not own.startswith("complex")
    if loses or (source != own and "float4_e2m1fn_x2" in {source, own}):
        assert "'w'" in message(outline, {"w": entry(dtype=source)})
    else:
        assert match(outline, {"w": entry(dtype=source)}).requests[0].dtype == own
        if source == own:
            return
        given_one = torch.zeros(2, dtype=torch.uint8).to(torch_dtype(source))
        torch.zeros(2, dtype=torch.uint8).to(torch_dtype(own)).copy_(given_one)


def test_a_parameter_that_requires_gradients_cannot_become_an_integer() -> None:
    assert "int8" in message(Outline(slots=(slot("w"),)), {"w": entry(dtype="int8")}, dtype="auto")
    frozen = Outline(slots=(slot("w", requires_grad=False),))
    assert match(frozen, {"w": entry(dtype="int8")}, dtype="auto").requests[0].dtype == "int8"


def test_one_element_in_one_dimension_fits_a_scalar() -> None:
    outline = Outline(slots=(slot("scale", shape=()),))
    assert match(outline, {"scale": entry(shape=(1,))}).requests[0].entry.shape == ()
    assert "shape" in message(outline, {"scale": entry(shape=(1, 1))})


def test_refused_tensors_are_not_unexpected() -> None:
    assert match(Outline(slots=(), refused=("b.weight",)), {"b.weight": entry()}).unexpected == ()


def test_unexpected_names_are_found_if_two_tensors_of_the_module_have_one_name() -> None:
    twice = Outline(slots=(slot("a.b.weight"), slot("a.b.weight")))
    assert match(twice, {"a.b.weight": entry(), "other": entry(1)}, strict=False).unexpected == ("other",)


def test_optional_names_alone_are_not_a_load() -> None:
    outline = Outline(slots=(slot("live", device="cpu"),))
    for strict in (True, False):
        assert "it has 0 of 1 tensors" in message(outline, {}, optional_names={"live"}, strict=strict)
        assert match(outline, {}, optional_names={"live"}, strict=strict, has_attributes=True).kept == (0,)
        assert match(outline, {}, optional_names={"live"}, strict=strict, allow_empty=True).kept == (0,)
    with_state = replace(outline, extra_state=("_extra_state",))
    assert match(with_state, {}, optional_names={"live"}, extra_state=["_extra_state"]).kept == (0,)
    assert "0 of 1" in message(outline, {}, strict=False, has_attributes=True)  # it requires a tensor


def test_five_hundred_problems_stay_readable() -> None:
    outline = Outline(slots=tuple(slot(f"layer.{i}.w") for i in range(500)))
    text = message(outline, {f"block.{i}.w": entry(i) for i in range(500)})
    assert "not in the checkpoint (500)" in text
    assert "and 480 more" in text
    assert text.count("\n") < 60
