"""Sparse and quantized tensors in torch's pickles, as entries that refer to their dense components.

- ``_rebuild_sparse_tensor(layout, (indices, values, size[, coalesced]))`` for COO
- ``_rebuild_sparse_tensor(layout, (compressed indices, plain indices, values, size))`` for CSR, CSC, BSR and BSC
- ``_rebuild_qtensor(storage, offset, size, stride, parameters, requires_grad, hooks)`` with parameters ``(scheme,
  scale, zero point)`` or ``(scheme, scales, zero points, axis)``

Shapes and dtypes are checked here. Whether indices are inside the tensor depends on their data, so it is checked when
they are read, before torch receives them.

Unsupported: quantized dtypes smaller than a byte, and symmetric schemes, which torch does not load.
"""

from __future__ import annotations

from math import prod
from typing import Any

from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES, MAX_SIGNED
from sluice._errors import FormatError, UnsupportedError
from sluice._options import Limits
from sluice.records import NO_STORAGE, Entry, Quantized, Sparse, TorchText, elements_of

__all__ = ["PACKED_DTYPES", "QUANTIZED_DTYPES", "quantized", "sparse"]

#: Dtype of the stored integers of each quantized dtype.
QUANTIZED_DTYPES: dict[str, str] = {"qint8": "int8", "quint8": "uint8", "qint32": "int32"}

#: Dtype in which torch counts the storages of quantized dtypes that pack several integers into a byte (unsupported).
PACKED_DTYPES: dict[str, str] = {"quint4x2": "uint8", "quint2x4": "uint8"}

_INDEX_DTYPES = frozenset({"int32", "int64"})

#: Dtypes of the scales and zero points of channels: with integer zero points, and with floating-point zero points.
_PARAMETER_DTYPES = frozenset({("float64", "int64"), ("float32", "float32")})

_PER_CHANNEL = ("torch.per_channel_affine", "torch.per_channel_affine_float_qparams")


def sparse(arguments: tuple[Any, ...], limits: Limits) -> Entry:
    """Return the entry of a sparse tensor.

    Args:
        arguments: Arguments of ``_rebuild_sparse_tensor``.
        limits: Bounds on dimensions.

    Raises:
        FormatError: The indices, values and size are inconsistent.
        UnsupportedError: torch does not load the layout.
    """
    layout, data = arguments if len(arguments) == 2 else (None, None)
    if type(layout) is not TorchText or type(data) is not tuple:
        raise FormatError("the arguments of a sparse tensor are not a layout and a tuple")
    if layout == "torch.sparse_coo":
        made, size = _coo(data)
    elif layout.removeprefix("torch.") in {"sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc"}:
        made, size = _compressed(layout.removeprefix("torch."), data)
    else:
        raise UnsupportedError("a sparse tensor with a layout that torch does not load", found=layout)
    if len(size) > limits.dimensions:
        raise FormatError(f"a tensor has more than {limits.dimensions} dimensions", found=len(size))
    if prod(max(count, 1) for count in size) * ITEM_BYTES[made.values.dtype] > MAX_SIGNED:
        raise FormatError("a tensor has more bytes than torch can count", expected=MAX_SIGNED)
    grad = any(type(each) is Entry and each.requires_grad for each in data)  # of values, which torch differentiates
    elements = elements_of(made.values.dtype)
    return Entry(elements=elements, shape=size, stride=(), storage=NO_STORAGE, composite=made, requires_grad=grad)


def _coo(data: tuple[Any, ...]) -> tuple[Sparse, tuple[int, ...]]:
    if len(data) not in (3, 4):
        raise FormatError("a sparse tensor has the wrong number of components", expected="3 or 4", found=len(data))
    indices, values, size = _dense(data[0]), _dense(data[1]), _size(data[2])
    coalesced = data[3] if len(data) == 4 else None
    if coalesced is not None and type(coalesced) is not bool:
        raise FormatError("the coalesced flag of a sparse tensor is not a bool")
    if indices.dtype != "int64" or len(indices.shape) != 2:
        raise FormatError("the indices of a sparse tensor are not an int64 matrix", found=_describe(indices))
    dims, count = indices.shape
    expected = (count, *size[dims:])
    if dims > len(size) or values.shape != expected:
        raise FormatError(
            "the values of a sparse tensor do not match its indices and size", expected=expected, found=values.shape
        )
    return Sparse(layout="sparse_coo", indices=(indices,), values=values, coalesced=coalesced), size


def _compressed(layout: str, data: tuple[Any, ...]) -> tuple[Sparse, tuple[int, ...]]:
    if len(data) != 4:
        raise FormatError("a sparse tensor has the wrong number of components", expected=4, found=len(data))
    compressed, plain, values, size = _dense(data[0]), _dense(data[1]), _dense(data[2]), _size(data[3])
    for indices in (compressed, plain):
        if indices.dtype not in _INDEX_DTYPES or not indices.shape or indices.dtype != plain.dtype:
            raise FormatError(
                "the indices of a sparse tensor are not int32 or int64 tensors of one dtype", found=_describe(indices)
            )
    batch = compressed.shape[:-1]
    at = len(batch)
    blocked = layout in {"sparse_bsr", "sparse_bsc"}
    block = values.shape[at + 1 : at + 3] if blocked else (1, 1)
    if len(size) < at + 2 or len(block) != 2 or 0 in block:
        raise FormatError("a sparse tensor has too few dimensions", found=f"{size} with values {values.shape}")
    expected = (*batch, plain.shape[-1], *(block if blocked else ()), *size[at + 2 :])
    if size[:at] != batch or plain.shape[:-1] != batch or values.shape != expected:
        raise FormatError(
            "the values of a sparse tensor do not match its indices and size", expected=expected, found=values.shape
        )
    if size[at] % block[0] or size[at + 1] % block[1]:
        raise FormatError(
            "the blocks of a sparse tensor do not divide its size", expected=block, found=size[at : at + 2]
        )
    rows = layout in {"sparse_csr", "sparse_bsr"}
    lines = size[at] // block[0] if rows else size[at + 1] // block[1]
    if compressed.shape[-1] != lines + 1:
        raise FormatError(
            "a sparse tensor has the wrong number of compressed indices", expected=lines + 1, found=compressed.shape[-1]
        )
    return Sparse(layout=layout, indices=(compressed, plain), values=values), size


def quantized(dtype: str, values: Entry, parameters: object) -> Entry:
    """Return the entry of a quantized tensor.

    Args:
        dtype: Quantized dtype, for example ``"qint8"``.
        values: Entry of the stored integers.
        parameters: Scheme, scale and zero point; for channels also the axis.

    Raises:
        FormatError: The parameters do not match the integers.
        UnsupportedError: torch does not load the scheme.
    """
    if type(parameters) is not tuple or not parameters or type(parameters[0]) is not TorchText:
        raise FormatError("a quantized tensor has no quantization scheme")
    scheme = parameters[0]
    if scheme == "torch.per_tensor_affine":
        made = _per_tensor(values, parameters)
    elif scheme in _PER_CHANNEL:
        made = _per_channel(values, parameters, floats=scheme == _PER_CHANNEL[1])
    else:
        raise UnsupportedError("a quantized tensor with a scheme that torch does not load", found=scheme)
    return Entry(
        elements=elements_of(dtype), shape=values.shape, stride=values.stride, storage=NO_STORAGE, composite=made
    )


def _per_tensor(values: Entry, parameters: tuple[Any, ...]) -> Quantized:
    _, scale, zero_point = parameters if len(parameters) == 3 else (None, None, None)
    if type(scale) is not float or type(zero_point) is not int or abs(zero_point) > MAX_SIGNED:
        raise FormatError("a quantized tensor has no valid scale and zero point")
    return Quantized(values=values, scales=(scale,), zero_points=(zero_point,))


def _per_channel(values: Entry, parameters: tuple[Any, ...], *, floats: bool) -> Quantized:
    _, scales, zero_points, axis = parameters if len(parameters) == 4 else (None, None, None, None)
    if type(axis) is not int or not 0 <= axis < len(values.shape):
        problem = "the axis of a quantized tensor is not one of its dimensions"
        expected = f"below {len(values.shape)}"
        raise FormatError(problem, expected=expected, found=axis)
    channels = values.shape[axis]
    if type(scales) is list and type(zero_points) is list:  # the representation before torch 1.5
        if len(scales) != channels or len(zero_points) != channels:
            raise FormatError("a quantized tensor needs a scale and a zero point for each channel", expected=channels)
        if not _are_numbers(float, scales) or not _are_numbers(float if floats else int, zero_points):
            raise FormatError("the scales and zero points of a quantized tensor are not numbers")
        return Quantized(values=values, scales=tuple(scales), zero_points=tuple(zero_points), axis=axis)
    scales, zero_points = _dense(scales), _dense(zero_points)
    if (scales.dtype, zero_points.dtype) not in _PARAMETER_DTYPES:
        found = f"{scales.dtype} and {zero_points.dtype}"
        raise FormatError("the scales and zero points of a quantized tensor have unexpected dtypes", found=found)
    if scales.shape != (channels,) or zero_points.shape != (channels,):
        raise FormatError(
            "a quantized tensor needs a scale and a zero point for each channel",
            expected=channels,
            found=f"{scales.shape} and {zero_points.shape}",
        )
    if channels > 1 and (scales.stride, zero_points.stride) != ((1,), (1,)):
        # For a legacy file, torch would make them contiguous before it has read their data.
        raise FormatError("the scales and zero points of a quantized tensor are not contiguous")
    return Quantized(values=values, scales=scales, zero_points=zero_points, axis=axis)


def _are_numbers(kind: type[float], numbers: list[Any]) -> bool:
    return all(type(number) is kind and abs(number) <= MAX_SIGNED for number in numbers)


def _dense(component: object) -> Entry:
    if type(component) is not Entry or component.composite is not None:
        raise FormatError("a component of a tensor is not a dense tensor")
    if component.elements.computed or component.parameter:
        raise FormatError("a component of a tensor is a parameter or a lazy view")
    return replace(component, attributes=None, requires_grad=False)  # no check of the tree reaches attributes


def _size(size: object) -> tuple[int, ...]:
    if not isinstance(size, tuple) or any(type(count) is not int or not 0 <= count <= MAX_SIGNED for count in size):
        raise FormatError("the size of a sparse tensor is not a valid torch.Size")
    return tuple(size)


def _describe(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"
