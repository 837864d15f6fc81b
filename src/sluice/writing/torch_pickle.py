"""Pickle an object as ``torch.save`` does; tensors become views of numbered storages, whose data is stored apart.

The pickle names only globals that ``torch.load(weights_only=True)`` allows. Tensors are represented by values that the
caller chooses and describes: tensors or records. Nothing recurses, and only values that occur more than once are
memoized.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from sluice._errors import SaveError
from sluice.formats.torch_save.plain_values import is_torch_name
from sluice.records import TorchSize, TorchText
from sluice.writing.batches import batched
from sluice.writing.pickle_opcodes import PickleOpcodes
from sluice.writing.pickle_walk import WalkedObject, elements
from sluice.writing.torch_tensors import (
    Described,
    Geometry,
    name_rebuild,
    write_arguments,
    write_hooks,
    write_layout,
    write_size,
    write_storage,
)

__all__ = ["is_plain", "pickle_object", "refusal"]

#: Items added to a container by one opcode; the reader holds that many on its stack.
_ITEMS_AT_ONCE = 1000


def pickle_object(obj: object, walked: WalkedObject, descriptions: Iterable[Described]) -> bytearray:
    """Return the pickle of an object.

    Args:
        obj: The object.
        walked: The result of ``walk_object``.
        descriptions: The description of each of ``walked.tensors``, in their order.

    Raises:
        SaveError: It contains something that ``torch.load(weights_only=True)`` would refuse.
    """
    return _Pickler(walked, iter(descriptions)).dump(obj)


def is_plain(value: object) -> bool:
    """Return whether a value that is not a tensor, container, number or string can be pickled."""
    return type(value) in _PLAIN


def refusal(value: Any) -> SaveError:
    """Return the error for a value that cannot be pickled."""
    is_named = isinstance(value, type) or callable(value)
    found = f"{getattr(value, '__qualname__', value)}" if is_named else f"an object of {type(value).__qualname__}"
    return SaveError("only tensors and plain values can be saved", found=found)


class _Pickler:
    """Write values one by one; the iterator over a container's values ends with the container's last opcodes."""

    def __init__(self, walked: WalkedObject, descriptions: Iterator[Described]) -> None:
        self._ops = PickleOpcodes()
        self._repeated = walked.repeated
        self._tensors = zip(walked.tensors, descriptions, strict=True)
        #: ids of unfinished tuples and other values that cannot be memoized before they are complete.
        self._unfinished: set[int] = set()

    def dump(self, obj: object) -> bytearray:
        waiting: list[Iterator[Any]] = [iter((obj,))]
        while waiting:
            for value in waiting[-1]:
                inside = self._begin(value)
                if inside is not None:
                    waiting.append(inside)
                    break
            else:
                waiting.pop()
        return self._ops.finish()

    def _begin(self, value: Any) -> Iterator[Any] | None:
        """Write a value; of a container write the beginning and return an iterator over its values."""
        kind: type = type(value)
        scalar = _SCALARS.get(kind)
        if scalar:
            scalar(self._ops, value)
            return None
        if id(value) in self._repeated:
            if self._ops.recall(id(value)):
                return None
            if id(value) in self._unfinished:
                raise SaveError("a tuple or set that contains itself cannot be saved")
        write: _Write = _WRITERS.get(kind, _Pickler.write_tensor)
        return write(self, value)

    def _start(self, value: object) -> None:
        if id(value) in self._repeated:
            self._unfinished.add(id(value))

    def _remember(self, value: object) -> None:
        if id(value) in self._repeated:
            self._ops.remember(id(value))
            self._unfinished.discard(id(value))

    def write_text(self, value: str) -> None:
        self._ops.text(value)
        self._remember(value)

    def write_bytes(self, value: bytes) -> None:
        self._ops.binary(value)
        self._remember(value)

    def write_bytearray(self, value: bytearray) -> None:
        self._ops.named("__builtin__", "bytearray")
        self._ops.binary(value)
        self._ops.call(1)
        self._remember(value)

    def write_size(self, value: torch.Size | TorchSize) -> None:
        write_size(self._ops, value)
        self._remember(value)

    def write_device(self, value: torch.device) -> None:
        self._write_device(*str(value).split(":"))

    def write_layout(self, value: torch.layout) -> None:
        write_layout(self._ops, str(value))

    def write_torch_text(self, value: TorchText) -> None:
        if is_torch_name(value):
            self._ops.named("torch", value.removeprefix("torch."))
        elif value.startswith("torch."):  # safe: any text is only an argument of the call
            write_layout(self._ops, str(value))
        else:
            self._write_device(*value.split(":"))

    def _write_device(self, kind: str, index: str = "") -> None:
        self._ops.named("torch", "device")
        self._ops.constant(kind)
        if index:
            self._ops.integer(int(index))
        self._ops.call(2 if index else 1)

    def write_torch_name(self, value: torch.dtype | torch.qscheme) -> None:
        self._ops.named("torch", str(value).removeprefix("torch."))

    def write_dict(self, value: dict[Any, Any]) -> Iterator[Any]:
        self._ops.out += PickleOpcodes.EMPTY_DICT
        self._remember(value)
        yield from self._items(value)

    def _items(self, value: Mapping[Any, Any]) -> Iterator[Any]:
        for batch in batched(value.items(), _ITEMS_AT_ONCE):
            self._ops.out += PickleOpcodes.MARK
            for key, child in batch:
                yield key
                yield child
            self._ops.out += PickleOpcodes.SETITEMS

    def write_ordered_dict(self, value: OrderedDict[Any, Any]) -> Iterator[Any]:
        self._ops.named("collections", "OrderedDict")
        self._ops.call(0)
        self._remember(value)
        yield from self._items(value)
        if vars(value):
            yield vars(value)
            self._ops.out += PickleOpcodes.BUILD

    def write_counter(self, value: Counter[Any]) -> Iterator[Any]:
        self._start(value)
        self._ops.named("collections", "Counter")
        self._ops.out += PickleOpcodes.EMPTY_DICT
        yield from self._items(value)
        self._ops.call(1)
        self._remember(value)

    def write_list(self, value: list[Any]) -> Iterator[Any]:
        self._ops.out += PickleOpcodes.EMPTY_LIST
        self._remember(value)
        yield from self._appended(value)

    def _appended(self, value: list[Any]) -> Iterator[Any]:
        for batch in batched(value, _ITEMS_AT_ONCE):
            self._ops.out += PickleOpcodes.MARK
            yield from batch
            self._ops.out += PickleOpcodes.APPENDS

    def write_tuple(self, value: tuple[Any, ...]) -> Iterator[Any]:
        self._start(value)
        self._ops.open_tuple(len(value))
        yield from value
        self._ops.close_tuple(len(value))
        self._remember(value)

    def write_set(self, value: set[Any]) -> Iterator[Any]:
        self._start(value)
        self._ops.named("__builtin__", "set")
        self._ops.out += PickleOpcodes.EMPTY_LIST
        yield from self._appended(elements(value))
        self._ops.call(1)
        self._remember(value)

    def write_tensor(self, value: object) -> Iterator[Any] | None:
        walked, tensor = next(self._tensors)
        if walked is not value:
            raise SaveError("the object changed while it was being saved")
        if tensor.bare:
            assert isinstance(tensor.content, Geometry)
            write_storage(self._ops, tensor.content)
            self._remember(value)
            return None
        if tensor.attributes:
            return self._with_attributes(value, tensor, tensor.attributes)
        if tensor.parameter:
            self._ops.named("torch._utils", "_rebuild_parameter")
            self._parameter(tensor)
            self._ops.call(3)
        else:
            self._rebuilt(tensor, requires_grad=tensor.requires_grad)
        self._remember(value)
        return None

    def _with_attributes(self, value: object, tensor: Described, attributes: Mapping[str, object]) -> Iterator[Any]:
        self._start(value)
        if tensor.parameter:
            self._ops.named("torch._utils", "_rebuild_parameter_with_state")
            self._ops.open_tuple(4)
            self._parameter(tensor)
        else:
            self._ops.named("torch._tensor", "_rebuild_from_type_v2")
            self._ops.open_tuple(4)
            name_rebuild(self._ops, tensor.content)
            self._ops.named("torch", "Tensor")
            write_arguments(self._ops, tensor.content, requires_grad=tensor.requires_grad)
        yield attributes
        self._ops.close_tuple(4)
        self._ops.reduce()
        self._remember(value)

    def _parameter(self, tensor: Described) -> None:
        """Write the first three arguments of the call that rebuilds a parameter."""
        self._rebuilt(tensor, requires_grad=False)
        self._ops.boolean(tensor.requires_grad)
        write_hooks(self._ops)

    def _rebuilt(self, tensor: Described, *, requires_grad: bool) -> None:
        name_rebuild(self._ops, tensor.content)
        write_arguments(self._ops, tensor.content, requires_grad=requires_grad)
        self._ops.reduce()


#: Writers of None and numbers, which are never memoized.
_SCALARS: Mapping[type, Callable[[PickleOpcodes, Any], None]] = {
    type(None): lambda ops, _: ops.none(),
    bool: PickleOpcodes.boolean,
    int: PickleOpcodes.integer,
    float: PickleOpcodes.floating,
    complex: PickleOpcodes.complex,
}

#: Writes a value; of a container writes the beginning and returns an iterator over its values.
_Write: TypeAlias = Callable[[_Pickler, Any], Iterator[Any] | None]

#: Writers of the other plain values.
_PLAIN: Mapping[type, _Write] = {
    str: _Pickler.write_text,
    bytes: _Pickler.write_bytes,
    bytearray: _Pickler.write_bytearray,
    torch.Size: _Pickler.write_size,
    TorchSize: _Pickler.write_size,
    TorchText: _Pickler.write_torch_text,
    torch.device: _Pickler.write_device,
    torch.layout: _Pickler.write_layout,
    torch.dtype: _Pickler.write_torch_name,
    torch.qscheme: _Pickler.write_torch_name,
}

_WRITERS: Mapping[type, _Write] = {
    **_PLAIN,
    dict: _Pickler.write_dict,
    OrderedDict: _Pickler.write_ordered_dict,
    Counter: _Pickler.write_counter,
    list: _Pickler.write_list,
    tuple: _Pickler.write_tuple,
    set: _Pickler.write_set,
}
