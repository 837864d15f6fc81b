"""Pickles an object as ``torch.save`` does, with its tensors taken out: each is a geometry over a numbered storage.

The pickle names only what ``torch.load(weights_only=True)`` allows. What stands for a tensor in the object, a tensor or
a record, is up to the caller, who describes it.
"""

from __future__ import annotations

import codecs
import collections
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._tensor import _rebuild_from_type_v2
from torch._utils import (
    _rebuild_parameter,
    _rebuild_parameter_with_state,
    _rebuild_tensor_v2,
    _rebuild_tensor_v3,
)

from sluice._dtypes import ITEM_BYTES, torch_dtype
from sluice._errors import SaveError

__all__ = ["Described", "pickle_object"]

#: Protocol of ``torch.save``.
_PROTOCOL = 2

#: torch's storage class for each dtype that has one; the others are untyped bytes with a dtype beside them.
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
}

#: What is pickled as it is: its reduction names nothing but itself and plain values.
_PLAIN = frozenset(
    {collections.OrderedDict, collections.Counter, torch.Size, torch.device, torch.dtype, complex, bytearray}
)

#: All that the pickle may name. Bytes become a call of ``codecs.encode`` in protocol 2.
_NAMED = (
    _rebuild_from_type_v2,
    _rebuild_parameter,
    _rebuild_parameter_with_state,
    _rebuild_tensor_v2,
    _rebuild_tensor_v3,
    codecs.encode,
    set,
    frozenset,
    torch.Tensor,
    torch.storage.UntypedStorage,
    *_PLAIN,
    *(getattr(torch, name) for name in _STORAGE_CLASSES.values()),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """A tensor as the pickle says it."""

    #: Number of its storage.
    storage: int
    #: Elements of that storage.
    elements: int
    #: Name of its dtype.
    dtype: str
    #: Device that it was on, as torch writes it.
    device: str = "cpu"
    #: First element, in elements from the start of the storage.
    start: int
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Step of each dimension, in elements.
    stride: tuple[int, ...]
    #: Whether gradients are recorded for it.
    requires_grad: bool = False
    #: Whether it is a ``torch.nn.Parameter``.
    parameter: bool = False
    #: Whether it is the conjugate, the negative or both of what the storage holds.
    math_bits: tuple[str, ...] = ()
    #: Python attributes of the tensor object.
    attributes: dict[str, object] | None = None


class _Storage(tuple[int, int, str, str]):
    """Number, elements, dtype and device of a storage: it becomes a persistent id."""

    __slots__ = ()


def pickle_object(obj: object, describe: Callable[[Any], Described | None]) -> bytes:
    """Return the pickle of an object.

    Args:
        obj: The object.
        describe: Returns what a value that is no builtin says of a tensor, or None for one that stands for none. Equal
            objects are described once.

    Raises:
        SaveError: It holds something that ``torch.load(weights_only=True)`` would refuse.
    """
    out = io.BytesIO()
    _Pickler(out, describe).dump(obj)
    return out.getvalue()


class _Pickler(pickle.Pickler):
    def __init__(self, out: io.BytesIO, describe: Callable[[Any], Described | None]) -> None:
        super().__init__(out, _PROTOCOL)
        self._describe = describe

    def reducer_override(self, value: Any) -> Any:
        """Reduce what is no builtin; called by the C pickler."""
        if type(value) is Described:
            return _reduction(value)
        found = self._describe(value)
        if found is not None:
            return _reduction(found)
        if type(value) in _PLAIN or any(value is named for named in _NAMED):
            return NotImplemented
        if isinstance(value, type) or callable(value):
            raise SaveError("only tensors and plain values are saved", found=f"{getattr(value, '__qualname__', value)}")
        raise SaveError("only tensors and plain values are saved", found=f"an object of {type(value).__qualname__}")

    def persistent_id(self, value: Any) -> Any:
        """Return torch's description of a storage."""
        if type(value) is not _Storage:
            return None
        number, elements, dtype, device = value
        if dtype in _STORAGE_CLASSES:
            return ("storage", getattr(torch, _STORAGE_CLASSES[dtype]), str(number), device, elements)
        return ("storage", torch.storage.UntypedStorage, str(number), device, elements * ITEM_BYTES[dtype])


def _reduction(tensor: Described) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return what rebuilds a tensor."""
    hooks: collections.OrderedDict[str, object] = collections.OrderedDict()
    if tensor.parameter:
        bare = replace(tensor, parameter=False, requires_grad=False, attributes=None)
        if tensor.attributes:
            return _rebuild_parameter_with_state, (bare, tensor.requires_grad, hooks, tensor.attributes)
        return _rebuild_parameter, (bare, tensor.requires_grad, hooks)
    storage = _Storage((tensor.storage, tensor.elements, tensor.dtype, tensor.device))
    arguments: tuple[Any, ...] = (
        storage,
        tensor.start,
        tensor.shape,
        tensor.stride,
        tensor.requires_grad,
        hooks,
    )
    rebuild: Callable[..., Any] = _rebuild_tensor_v2
    if tensor.dtype not in _STORAGE_CLASSES:
        rebuild, arguments = _rebuild_tensor_v3, (*arguments, torch_dtype(tensor.dtype))
    if tensor.math_bits:
        arguments = (*arguments, dict.fromkeys(tensor.math_bits, True))
    if tensor.attributes:
        return _rebuild_from_type_v2, (rebuild, torch.Tensor, arguments, tensor.attributes)
    return rebuild, arguments
