"""Values of a torch pickle that Python's types do not describe, and the calls that rebuild dense tensors. No torch."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from msgspec import Struct

from sluice._dtypes import ITEM_BYTES
from sluice.formats.torch_save.storages import STORAGE_DTYPES
from sluice.records import Entry

__all__ = ["Call", "Global", "MemoizedText", "Persistent", "dense", "layout", "rebuilt", "size", "stored"]


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
_STORAGE_CLASSES = {dtype: Global("torch", name) for name, dtype in STORAGE_DTYPES.items() if dtype in ITEM_BYTES}

#: The empty hooks that torch writes for each tensor: hooks are never saved.
_HOOKS = Call(Global("collections", "OrderedDict"), ())

_STORAGE = MemoizedText("storage")
_UNTYPED_STORAGE = Global("torch.storage", "UntypedStorage")
_REBUILD_TENSOR = Global("torch._utils", "_rebuild_tensor_v2")
_REBUILD_UNTYPED = Global("torch._utils", "_rebuild_tensor_v3")

#: Names of devices, memoized.
_device = cache(MemoizedText)


def stored(view: Entry, elements: int, device: str = "cpu") -> Persistent:
    """Return the storage of a tensor.

    Args:
        view: The tensor, whose storage is numbered in the new file.
        elements: Size of this storage, in elements.
        device: Its original device, as torch writes it.
    """
    kind = _STORAGE_CLASSES.get(view.dtype)
    if kind is None:
        kind, elements = _UNTYPED_STORAGE, elements * view.elements.item_bytes
    return Persistent((_STORAGE, kind, str(view.storage), _device(device), elements))


def rebuilt(view: Entry, storage: Persistent) -> Call:
    """Return the call that rebuilds a tensor of a storage, with its flags and Python attributes."""
    call = dense(view, storage)
    if view.parameter:
        arguments: tuple[Any, ...] = call, view.requires_grad, _HOOKS
        if view.attributes:
            return Call(Global("torch._utils", "_rebuild_parameter_with_state"), (*arguments, view.attributes))
        return Call(Global("torch._utils", "_rebuild_parameter"), arguments)
    if not view.attributes:
        return call
    arguments = call.function, Global("torch", "Tensor"), call.arguments, view.attributes
    return Call(Global("torch._tensor", "_rebuild_from_type_v2"), arguments)


def dense(view: Entry, storage: Persistent) -> Call:
    """Return the call that rebuilds a tensor alone: ``_rebuild_tensor_v3`` for dtypes without a storage class."""
    requires_grad = view.requires_grad and not view.parameter
    arguments = storage, view.storage_offset, view.shape, view.stride, requires_grad, _HOOKS
    marks = view.elements.math_bits
    bits = ({MemoizedText(bit): True for bit in marks},) if marks else ()
    if view.dtype in _STORAGE_CLASSES:
        return Call(_REBUILD_TENSOR, (*arguments, *bits))
    return Call(_REBUILD_UNTYPED, (*arguments, Global("torch", view.dtype), *bits))


def layout(name: str) -> Call:
    """Return the call that makes a ``torch.layout``, from its name: ``"torch.strided"``."""
    return Call(Global("torch.serialization", "_get_layout"), (MemoizedText(name),))


def size(sizes: tuple[int, ...]) -> Call:
    """Return the call that makes a ``torch.Size``."""
    return Call(Global("torch", "Size"), (tuple(sizes),))
