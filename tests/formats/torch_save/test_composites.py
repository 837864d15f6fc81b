"""Sparse and quantized tensors in an index: contradictory headers are refused before data is read."""

from __future__ import annotations

from typing import Any

import pytest

from sluice._errors import FormatError
from support.hostile_archives import Call, Global, storage, tensor_call
from support.pickles import load

HOOKS = Call(Global("collections", "OrderedDict"))


def layout(name: str) -> Call:
    return Call(Global("torch.serialization", "_get_layout"), (f"torch.{name}",))


def size(*counts: object) -> Call:
    return Call(Global("torch", "Size"), (counts,))


def longs(*shape: int, kind: str = "LongStorage", **how: Any) -> Call:
    return tensor_call(storage("i" + "x".join(map(str, shape)) + kind, 1000, kind=kind), shape=shape, **how)


def floats(*shape: int, **how: Any) -> Call:
    return tensor_call(storage("v", 1000), shape=shape, **how)


def sparse(name: str, *data: object) -> Call:
    return Call(Global("torch._utils", "_rebuild_sparse_tensor"), (layout(name), data))


def quantized(parameters: object, *, kind: str = "QInt8Storage", shape: tuple[int, ...] = (3, 4), **how: Any) -> Call:
    """Return the call that rebuilds a quantized tensor of a storage of 12 elements."""
    stride = how.get("stride", (4, 1) if len(shape) == 2 else (1,) * len(shape))
    grad, hooks = how.get("requires_grad", False), how.get("hooks", HOOKS)
    held = storage("q", how.get("numel", 12), kind=kind)
    arguments = (held, how.get("offset", 0), shape, stride, parameters, grad, hooks)
    return Call(Global("torch._utils", "_rebuild_qtensor"), arguments)


AFFINE = (Global("torch", "per_tensor_affine"), 0.5, 3)


def channels(scales: object, zero_points: object, axis: object = 0, *, kind: str = "per_channel_affine") -> object:
    return (Global("torch", kind), scales, zero_points, axis)


DOUBLES = tensor_call(storage("d", 3, kind="DoubleStorage"), shape=(3,))


def test_components_have_no_attributes() -> None:
    function, plain = Global("torch._tensor", "_rebuild_from_type_v2"), floats(5)
    values = Call(function, (plain.function, Global("torch", "Tensor"), plain.arguments, {"x": []}))
    data = longs(2, 5), values, size(3, 4)
    assert load([sparse("sparse_coo", *data)])[0].composite.values.attributes is None


def refused(value: Call, problem: str) -> None:
    with pytest.raises(FormatError, match=problem) as caught:
        load({"layers": [value]})
    assert caught.value.tensor == "layers.0"
    assert caught.value.offset is not None


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ((), "number of components"),
        ((longs(2, 5), floats(5)), "number of components"),
        ((longs(2, 5), floats(5), size(3, 4), True, 1), "number of components"),
        ((longs(2, 5), floats(4), size(3, 4), True), "do not match"),
        ((longs(2, 5), floats(5, 1), size(3, 4), True), "do not match"),
        ((longs(3, 5), floats(5), size(3, 4), True), "do not match"),
        ((longs(1, 5), floats(5, 3), size(3, 4), True), "do not match"),
        ((longs(10), floats(5), size(3, 4), True), "not an int64 matrix"),
        ((longs(2, 5, kind="IntStorage"), floats(5), size(3, 4), True), "not an int64 matrix"),
        ((floats(2, 5), floats(5), size(3, 4), True), "not an int64 matrix"),
        ((longs(2, 5), floats(5), size(3, 4), 1), "coalesced flag"),
        ((longs(2, 5), floats(5), [3, 4], True), "not a valid torch.Size"),
        ((longs(2, 5), floats(5), (3, -4), True), "not a valid torch.Size"),
        ((longs(2, 5), floats(5), (3, True), True), "not a valid torch.Size"),
        ((longs(2, 5), floats(5), size(2**62, 2**62), True), "more bytes than torch"),
        ((longs(2, 5), floats(5), size(2**31, 2**30), True), "more bytes than torch"),
        ((longs(2, 0), floats(0, 2**61), size(0, 2**61, 2**61), True), "more bytes than torch"),
        ((longs(65, 1), floats(1), size(*(65 * [1])), True), "more than 64 dimensions"),
        ((5, floats(5), size(3, 4), True), "is not a dense"),
        ((longs(2, 5), sparse("sparse_coo", longs(1, 5), floats(5), size(5)), size(3, 4)), "not a dense"),
        ((longs(2, 5), floats(5, extra=({"neg": True},)), size(3, 4), True), "a parameter or a lazy view"),
    ],
)
def test_coo_tensors_that_contradict_themselves(data: tuple[object, ...], problem: str) -> None:
    refused(sparse("sparse_coo", *data), problem)


@pytest.mark.parametrize(
    ("name", "data", "problem"),
    [
        ("sparse_csr", (longs(4), longs(5), floats(5)), "number of components"),
        ("sparse_csr", (longs(5), longs(5), floats(5), size(3, 4)), "compressed indices"),
        ("sparse_csc", (longs(4), longs(5), floats(5), size(3, 4)), "compressed indices"),
        ("sparse_bsr", (longs(4), longs(5), floats(5, 2, 3), size(4, 6)), "compressed indices"),
        ("sparse_bsc", (longs(4), longs(5), floats(5, 2, 3), size(4, 6)), "compressed indices"),
        ("sparse_csr", (longs(4), longs(5), floats(4), size(3, 4)), "do not match"),
        ("sparse_csr", (longs(4), longs(5), floats(5), size(3, 4, 2)), "do not match"),
        ("sparse_csr", (longs(2, 4), longs(5), floats(5), size(3, 4)), "too few dimensions"),
        ("sparse_csr", (longs(2, 4), longs(3, 5), floats(2, 5), size(2, 3, 4)), "do not match"),
        ("sparse_csr", (longs(2, 4), longs(2, 5), floats(2, 5), size(3, 3, 4)), "do not match"),
        ("sparse_csr", (longs(4), longs(5), floats(5), size(3)), "too few dimensions"),
        ("sparse_bsr", (longs(3), longs(5), floats(5), size(4, 6)), "too few dimensions"),
        ("sparse_bsr", (longs(3), longs(5), floats(5, 0, 3), size(4, 6)), "too few dimensions"),
        ("sparse_bsr", (longs(3), longs(5), floats(5, 3, 3), size(4, 6)), "blocks"),
        ("sparse_csr", (longs(4, kind="IntStorage"), longs(5), floats(5), size(3, 4)), "not int32 or int64"),
        (
            "sparse_csr",
            (longs(4, kind="ShortStorage"), longs(5, kind="ShortStorage"), floats(5), size(3, 4)),
            "not int32",
        ),
        ("sparse_csr", (floats(4), floats(5), floats(5), size(3, 4)), "not int32 or int64"),
        ("sparse_csr", (longs(), longs(5), floats(5), size(3, 4)), "not int32 or int64"),
        ("sparse_csr", (longs(4), longs(5), floats(5), size(3, 2**63)), "not a valid torch.Size"),
    ],
)
def test_compressed_tensors_that_contradict_themselves(name: str, data: tuple[object, ...], problem: str) -> None:
    refused(sparse(name, *data), problem)


def test_other_layouts() -> None:
    for name in ("strided", "jagged"):
        leaf = load([sparse(name, longs(1), floats(1), size(1))])[0]
        assert repr(leaf) == f"<not loaded: a sparse tensor with a layout that torch does not load, torch.{name}>"
    function = Global("torch._utils", "_rebuild_sparse_tensor")
    refused(Call(function, (1, ())), "not a layout")
    refused(Call(function, (layout("sparse_coo"), [])), "not a layout")
    refused(Call(function, ()), "not a layout")


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (quantized(AFFINE, kind="QUInt4x2Storage"), "elements smaller than a byte, torch.quint4x2"),
        (quantized((Global("torch", "per_tensor_symmetric"), 0.5)), "scheme that torch does not load"),
        (
            tensor_call(storage("q", 12, kind="QInt8Storage"), shape=(1,)),
            "torch has it, torch.qint8",
        ),
    ],
)
def test_quantized_tensors_that_are_not_read(value: Call, what: str) -> None:
    assert what in repr(load([value])[0])


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (quantized(AFFINE, shape=(13,)), "past the end"),
        (quantized(AFFINE, offset=1), "past the end"),
        (quantized(AFFINE, stride=(-4, 1)), "not a valid integer"),
        (quantized(AFFINE, requires_grad=True), "a tensor of qint8 has an invalid requires_grad"),
        (quantized(AFFINE, kind="CharStorage"), "not a view of a quantized storage"),
        (quantized(()), "has no quantization scheme"),
        (quantized((AFFINE[0], 1, 3)), "no valid scale"),
        (quantized((AFFINE[0], 0.5, 3.0)), "no valid scale"),
        (quantized((AFFINE[0], 0.5, 2**63)), "no valid scale"),
        (quantized((AFFINE[0], 0.5)), "no valid scale"),
        (quantized(channels(DOUBLES, longs(3), 2)), "not one of its dimensions"),
        (quantized(channels(DOUBLES, longs(3), -1)), "not one of its dimensions"),
        (quantized(channels(DOUBLES, longs(3), True)), "not one of its dimensions"),
        (quantized(channels(DOUBLES, longs(3), 0)[:3]), "not one of its dimensions"),  # type: ignore[index]
        (quantized(channels(DOUBLES, longs(4))), "for each channel"),
        (quantized(channels(DOUBLES, longs(3), 1)), "for each channel"),
        (quantized(channels(DOUBLES, longs(3, 1))), "for each channel"),
        (quantized(channels(longs(3), longs(3))), "unexpected dtypes"),
        (quantized(channels(floats(3), longs(3))), "unexpected dtypes"),
        (quantized(channels(DOUBLES, longs(3, kind="IntStorage"))), "unexpected dtypes"),
        (quantized(channels(DOUBLES, longs(3, stride=(0,)))), "not contiguous"),
        (quantized(channels(DOUBLES, longs(3, stride=(2,)))), "not contiguous"),
        (quantized(channels([0.5, 0.5], [1, 2, 3])), "for each channel"),
        (quantized(channels([0.5, 0.5, 1], [1, 2, 3])), "not numbers"),
        (quantized(channels([0.5, 0.5, 1.0], [1, 2, 2.0])), "not numbers"),
        (quantized(channels([0.5, 0.5, 1.0], [1, 2, 2**64])), "not numbers"),
        (quantized(channels([0.5, 0.5, 1.0], longs(3))), "not a dense"),
    ],
)
def test_quantized_tensors_that_contradict_themselves(value: Call, problem: str) -> None:
    refused(value, problem)
