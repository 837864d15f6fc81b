"""Tensors in a torch pickle: calls that rebuild them from numbered storages. No torch.

- dense: ``_rebuild_tensor_v2``, or ``_rebuild_tensor_v3`` for dtypes without a storage class
- sparse: ``_rebuild_sparse_tensor`` of its indices and values
- quantized: ``_rebuild_qtensor`` of its integers, scales and zero points
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES
from sluice.writing.pickle_opcodes import PickleOpcodes

__all__ = [
    "Described",
    "Geometry",
    "QuantizedParts",
    "SparseParts",
    "name_rebuild",
    "write_arguments",
    "write_hooks",
    "write_storage",
]

#: torch's storage class for each dtype that has one; other storages are untyped bytes plus a dtype.
_STORAGE_CLASSES = {
    "float64": "DoubleStorage",
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "int64": "LongStorage",
    "int32": "IntStorage",
    "int16": "ShortStorage",
    "int8": "CharStorage",
    "uint8": "ByteStorage",
    "bool": "BoolStorage",
    "complex128": "ComplexDoubleStorage",
    "complex64": "ComplexFloatStorage",
    "qint8": "QInt8Storage",
    "quint8": "QUInt8Storage",
    "qint32": "QInt32Storage",
}


class Geometry(Struct, frozen=True, kw_only=True):
    """A dense tensor: a view of a storage."""

    #: Number of its storage.
    storage: int
    #: Size of that storage, in elements.
    elements: int
    #: Name of its dtype.
    dtype: str
    #: Original device, as torch writes it.
    device: str = "cpu"
    #: First element, in elements from the start of the storage.
    start: int
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension, in elements.
    stride: tuple[int, ...]
    #: Whether it is a conjugate view, a negative view or both.
    math_bits: tuple[str, ...] = ()


class SparseParts(Struct, frozen=True, kw_only=True):
    """A sparse tensor: its indices and values."""

    #: Its layout: ``"sparse_coo"``.
    layout: str
    #: Indices, in torch's order, and values.
    parts: tuple[Geometry, ...]
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: COO: whether the indices are sorted and unique; None if unknown.
    coalesced: bool | None = None


class QuantizedParts(Struct, frozen=True, kw_only=True):
    """A quantized tensor: its integers, scales and zero points."""

    #: Its dtype: ``"qint8"``.
    dtype: str
    #: Its integers.
    integers: Geometry
    #: The scale of the tensor, or of each channel.
    scales: Geometry | tuple[float, ...]
    #: The zero point of the tensor, or of each channel.
    zero_points: Geometry | tuple[float, ...]
    #: Dimension of the channels; None for a single scale.
    axis: int | None = None


class Described(Struct, frozen=True, kw_only=True):
    """Description of a tensor for the pickle."""

    #: Its view of a storage, or its components.
    content: Geometry | SparseParts | QuantizedParts
    #: Whether gradients are recorded for it.
    requires_grad: bool = False
    #: Whether it is a ``torch.nn.Parameter``.
    parameter: bool = False
    #: Whether it is a storage without a tensor.
    bare: bool = False
    #: Python attributes of the tensor object.
    attributes: Mapping[str, object] | None = None


def name_rebuild(ops: PickleOpcodes, content: Geometry | SparseParts | QuantizedParts) -> None:
    """Append the function that rebuilds a tensor."""
    if isinstance(content, Geometry):
        name = "_rebuild_tensor_v2" if content.dtype in _STORAGE_CLASSES else "_rebuild_tensor_v3"
    else:
        name = "_rebuild_sparse_tensor" if isinstance(content, SparseParts) else "_rebuild_qtensor"
    ops.named("torch._utils", name)


def write_arguments(
    ops: PickleOpcodes, content: Geometry | SparseParts | QuantizedParts, *, requires_grad: bool
) -> None:
    """Append the tuple of arguments of that function."""
    if isinstance(content, Geometry):
        _dense(ops, content, requires_grad=requires_grad)
    elif isinstance(content, SparseParts):
        _sparse(ops, content)
    else:
        _quantized(ops, content, requires_grad=requires_grad)


def write_hooks(ops: PickleOpcodes) -> None:
    """Append the empty OrderedDict that torch writes in place of a tensor's hooks, which are never saved."""
    ops.named("collections", "OrderedDict")
    ops.call(0)


def _view(ops: PickleOpcodes, view: Geometry) -> None:
    """Append four values: the storage, and offset, shape and stride of the view."""
    write_storage(ops, view)
    ops.integer(view.start)
    ops.integers(view.shape)
    ops.integers(view.stride)


def write_storage(ops: PickleOpcodes, view: Geometry) -> None:
    """Append the storage of a view, as torch's persistent id."""
    typed = view.dtype in _STORAGE_CLASSES
    ops.open_tuple(5)
    ops.constant("storage")
    ops.named("torch" if typed else "torch.storage", _STORAGE_CLASSES.get(view.dtype, "UntypedStorage"))
    ops.text(str(view.storage))
    ops.constant(view.device)
    ops.integer(view.elements if typed else view.elements * ITEM_BYTES[view.dtype])
    ops.close_tuple(5)
    ops.persistent()


def _dense(ops: PickleOpcodes, view: Geometry, *, requires_grad: bool) -> None:
    untyped = view.dtype not in _STORAGE_CLASSES
    length = 6 + untyped + bool(view.math_bits)
    ops.open_tuple(length)
    _view(ops, view)
    ops.boolean(requires_grad)
    write_hooks(ops)
    if untyped:
        ops.named("torch", view.dtype)
    if view.math_bits:
        ops.flags(view.math_bits)
    ops.close_tuple(length)


def _tensor(ops: PickleOpcodes, view: Geometry) -> None:
    name_rebuild(ops, view)
    _dense(ops, view, requires_grad=False)
    ops.reduce()


def _sparse(ops: PickleOpcodes, sparse: SparseParts) -> None:
    write_layout(ops, f"torch.{sparse.layout}")
    length = len(sparse.parts) + 1 + (sparse.coalesced is not None)
    ops.open_tuple(length)
    for part in sparse.parts:
        _tensor(ops, part)
    write_size(ops, sparse.shape)
    if sparse.coalesced is not None:
        ops.boolean(sparse.coalesced)
    ops.close_tuple(length)
    ops.close_tuple(2)


def write_layout(ops: PickleOpcodes, layout: str) -> None:
    """Append a ``torch.layout``, from its name: ``"torch.strided"``."""
    ops.named("torch.serialization", "_get_layout")
    ops.constant(layout)
    ops.call(1)


def write_size(ops: PickleOpcodes, size: tuple[int, ...]) -> None:
    """Append a ``torch.Size``."""
    ops.named("torch", "Size")
    ops.integers(size)
    ops.call(1)


def _quantized(ops: PickleOpcodes, tensor: QuantizedParts, *, requires_grad: bool) -> None:
    ops.open_tuple(7)
    _view(ops, replace(tensor.integers, dtype=tensor.dtype))
    if tensor.axis is None:
        assert isinstance(tensor.scales, tuple)
        assert isinstance(tensor.zero_points, tuple)
        ops.named("torch", "per_tensor_affine")
        ops.floating(tensor.scales[0])
        ops.integer(int(tensor.zero_points[0]))
        ops.close_tuple(3)
    else:
        ops.open_tuple(4)
        ops.named("torch", _channel_scheme(tensor))
        _numbers(ops, tensor.scales)
        _numbers(ops, tensor.zero_points)
        ops.integer(tensor.axis)
        ops.close_tuple(4)
    ops.boolean(requires_grad)
    write_hooks(ops)
    ops.close_tuple(7)


def _channel_scheme(tensor: QuantizedParts) -> str:
    points = tensor.zero_points
    floats = (
        points.dtype == "float32" if isinstance(points, Geometry) else any(type(point) is float for point in points)
    )
    return "per_channel_affine_float_qparams" if floats else "per_channel_affine"


def _numbers(ops: PickleOpcodes, numbers: Geometry | tuple[float, ...]) -> None:
    if isinstance(numbers, Geometry):
        _tensor(ops, numbers)
        return
    ops.out += PickleOpcodes.EMPTY_LIST + PickleOpcodes.MARK
    for number in numbers:
        if type(number) is float:
            ops.floating(number)
        else:
            ops.integer(int(number))
    ops.out += PickleOpcodes.APPENDS
