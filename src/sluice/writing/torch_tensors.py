"""Values of a torch pickle that Python's types do not describe, and the calls that rebuild dense tensors. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from msgspec import Struct

from sluice._dtypes import ITEM_BYTES

__all__ = [
    "Call",
    "Geometry",
    "Global",
    "MemoizedText",
    "Persistent",
    "dense",
    "layout",
    "rebuilt",
    "size",
    "stored",
]


class Global(NamedTuple):
    """A name of a module; memoized."""

    module: str
    name: str


class Call(Struct, frozen=True):
    """The result of a call."""

    function: Global
    arguments: tuple[Any, ...]


class Persistent(Struct, frozen=True):
    """An object that is stored apart; its key has no containers."""

    key: tuple[Any, ...]


class MemoizedText(str):
    """A text that is memoized, because many calls have it."""

    __slots__ = ()


#: torch's storage class for each dtype that has one; other storages are untyped bytes plus a dtype.
_STORAGE_CLASSES = {
    "float64": Global("torch", "DoubleStorage"),
    "float32": Global("torch", "FloatStorage"),
    "float16": Global("torch", "HalfStorage"),
    "bfloat16": Global("torch", "BFloat16Storage"),
    "int64": Global("torch", "LongStorage"),
    "int32": Global("torch", "IntStorage"),
    "int16": Global("torch", "ShortStorage"),
    "int8": Global("torch", "CharStorage"),
    "uint8": Global("torch", "ByteStorage"),
    "bool": Global("torch", "BoolStorage"),
    "complex128": Global("torch", "ComplexDoubleStorage"),
    "complex64": Global("torch", "ComplexFloatStorage"),
}

#: The empty hooks that torch writes for each tensor: hooks are never saved.
_HOOKS = Call(Global("collections", "OrderedDict"), ())

_STORAGE = MemoizedText("storage")
_UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")
_REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_UNTYPED = Global("torch._utils", "_rebuild_tensor_v3")

#: Names of devices, memoized.
_device = cache(MemoizedText)


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


def rebuilt(
    view: Geometry, *, requires_grad: bool, parameter: bool, attributes: Mapping[str, object] | None = None
) -> Call:
    """Return the call that rebuilds a tensor with its flags and Python attributes.

    Args:
        view: The tensor without them.
        requires_grad: Whether gradients are recorded for it.
        parameter: Whether it is a ``torch.nn.Parameter``.
        attributes: Python attributes of the tensor object.
    """
    if parameter:
        arguments = dense(view), requires_grad, _HOOKS
        if attributes:
            return Call(Global("torch._utils", "_rebuild_parameter_with_state"), (*arguments, attributes))
        return Call(Global("torch._utils", "_rebuild_parameter"), arguments)
    call = dense(view, requires_grad=requires_grad)
    if not attributes:
        return call
    tensor = Global("torch", "Tensor")
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), (call.function, tensor, call.arguments, attributes))


def stored(view: Geometry) -> Persistent:
    """Return the storage of a view."""
    kind, length = _STORAGE_CLASSES.get(view.dtype), view.elements
    if kind is None:
        kind, length = _UNTYPED_STORAGE, view.elements * ITEM_BYTES[view.dtype]
    return Persistent((_STORAGE, kind, str(view.storage), _device(view.device), length))


def dense(view: Geometry, *, requires_grad: bool = False) -> Call:
    """Return the call that rebuilds a tensor: ``_rebuild_tensor_v3`` for dtypes without a storage class."""
    arguments = stored(view), view.start, view.shape, view.stride, requires_grad, _HOOKS
    bits = ({MemoizedText(bit): True for bit in view.math_bits},) if view.math_bits else ()
    if view.dtype in _STORAGE_CLASSES:
        return Call(_REBUILD_TENSOR, (*arguments, *bits))
    return Call(_REBUILD_UNTYPED, (*arguments, Global("torch", view.dtype), *bits))


def layout(name: str) -> Call:
    """Return the call that makes a ``torch.layout``, from its name: ``"torch.strided"``."""
    return Call(Global("torch.serialization", "_get_layout"), (MemoizedText(name),))


def size(sizes: tuple[int, ...]) -> Call:
    """Return the call that makes a ``torch.Size``."""
    return Call(Global("torch", "Size"), (tuple(sizes),))
