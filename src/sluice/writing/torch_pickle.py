"""Pickle an object as ``torch.save`` does; tensors become views of numbered storages, whose data is stored apart.

The pickle names only globals that ``torch.load(weights_only=True)`` allows. Tensors are represented by values that the
caller chooses and describes: tensors or records. Nothing recurses, and only values that occur more than once are
memoized.
"""

from __future__ import annotations

import pickle
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain, islice
from typing import Any, TypeAlias

import torch

from sluice._errors import SaveError
from sluice.formats.torch_save.plain_values import is_torch_name
from sluice.records import TorchSize, TorchText
from sluice.writing.pickle_walk import WalkedObject, elements
from sluice.writing.torch_tensors import Call, Global, MemoizedText, Persistent, layout, size

__all__ = ["is_plain", "pickle_object", "refusal"]

#: The containers in a container, each begun.
_Inside: TypeAlias = Iterator["_Inside"]

#: Items added to a container by one opcode; the reader holds that many on its stack.
_ITEMS_AT_ONCE = 1000

#: Opcodes of tuples that need no mark, by length.
_SHORT_TUPLES = (b")", b"\x85", b"\x86", b"\x87")

#: Longest integer that torch reads, in bytes.
_LONGEST_INTEGER_BYTES = 255

_LONGEST_TEXT_BYTES = (1 << 32) - 1


def pickle_object(obj: object, walked: WalkedObject, descriptions: Iterable[Call | Persistent]) -> bytearray:
    """Return the pickle of an object.

    Args:
        obj: The object.
        walked: The result of ``walk_object``.
        descriptions: What rebuilds each of ``walked.tensors``, in their order.

    Raises:
        SaveError: It contains something that ``torch.load(weights_only=True)`` would refuse.
    """
    return _Pickler(walked, iter(descriptions)).dump(obj)


def is_plain(value: object) -> bool:
    """Return whether a value that is not a tensor, container, number or string can be pickled."""
    return type(value) in _PLAIN


def refusal(value: Any, name: str | None = None) -> SaveError:
    """Return the error for a value that cannot be pickled."""
    is_named = isinstance(value, type) or callable(value)
    found = f"{getattr(value, '__qualname__', value)}" if is_named else f"an object of {type(value).__qualname__}"
    advice = None if is_named else "Put float(x), x.tolist() or dict(x) in its place. Existing files are intact."
    return SaveError("only tensors and plain values can be saved", tensor=name, found=found, advice=advice)


class _Pickler:
    """Write values one by one; the iterator over the containers in a container ends with its last opcodes."""

    def __init__(self, walked: WalkedObject, descriptions: Iterator[Call | Persistent]) -> None:
        self._out = bytearray(b"\x80\x02")
        self._memo: dict[Hashable, int] = {}
        self._repeated = walked.repeated
        self._tensors = zip(walked.tensors, descriptions, strict=True)
        #: ids of unfinished tuples and other values that cannot be memoized before they are complete.
        self._unfinished: set[int] = set()

    def dump(self, obj: object) -> bytearray:
        waiting: list[_Inside] = [self._all((obj,))]
        while waiting:
            for inside in waiting[-1]:
                waiting.append(inside)
                break
            else:
                waiting.pop()
        self._out += b"."
        return self._out

    def _all(self, values: Iterable[Any]) -> _Inside:
        for value in values:
            inside = self._begin(value)
            if inside is not None:
                yield inside

    def _begin(self, value: Any) -> _Inside | None:
        """Write a value; of a container write the beginning and return an iterator over the containers in it."""
        kind: type = type(value)
        scalar = _SCALARS.get(kind)
        if scalar:
            self._out += scalar(value)
            return None
        if id(value) in self._repeated:
            if self._recall(id(value)):
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
            self._memoize(id(value))
            self._unfinished.discard(id(value))

    def _recall(self, key: Hashable) -> bool:
        """Append the value memoized under a key; return whether there is one."""
        number = self._memo.get(key)
        if number is not None:
            self._out += _memo(b"hj", number)
        return number is not None

    def _memoize(self, key: Hashable) -> None:
        """Memoize the last value under a key."""
        number = self._memo[key] = len(self._memo)
        self._out += _memo(b"qr", number)

    def write_text(self, value: str) -> None:
        self._out += _text(value)
        self._remember(value)

    def write_constant(self, value: MemoizedText) -> None:
        if not self._recall(value):
            self._out += _text(value)
            self._memoize(value)

    def write_global(self, value: Global) -> None:
        if not self._recall(value):
            self._out += f"c{value.module}\n{value.name}\n".encode()
            self._memoize(value)

    def write_call(self, value: Call) -> _Inside | None:
        self.write_global(value.function)
        if value.arguments:
            return self._in_tuple(value.arguments, partial(self._out.extend, b"R"))
        self._out += b")R"
        return None

    def write_persistent(self, value: Persistent) -> None:
        before, after = _tuple_ends(len(value.key))
        self._out += before
        for part in value.key:
            self._begin(part)
        self._out += after + b"Q"

    def write_reduced(self, value: Any) -> _Inside:
        self._start(value)
        yield from self._all((_REDUCED[type(value)](value),))
        self._remember(value)

    def write_dict(self, value: dict[Any, Any]) -> _Inside:
        self._out += b"}"
        self._remember(value)
        yield from self._items(value)

    def _items(self, value: Mapping[Any, Any]) -> _Inside:
        items = iter(value.items())
        while batch := list(islice(items, _ITEMS_AT_ONCE)):
            self._out += b"("
            yield from self._all(chain.from_iterable(batch))
            self._out += b"u"

    def write_ordered_dict(self, value: OrderedDict[Any, Any]) -> _Inside:
        self.write_call(Call(Global("collections", "OrderedDict"), ()))
        self._remember(value)
        yield from self._items(value)
        if vars(value):
            yield from self._all((vars(value),))
            self._out += b"b"

    def write_list(self, value: list[Any]) -> _Inside:
        self._out += b"]"
        self._remember(value)
        items = iter(value)
        while batch := list(islice(items, _ITEMS_AT_ONCE)):
            self._out += b"("
            yield from self._all(batch)
            self._out += b"e"

    def write_tuple(self, value: tuple[Any, ...]) -> _Inside | None:
        if id(value) not in self._repeated and all(type(each) is int for each in value):  # sizes: without an iterator
            before, after = _tuple_ends(len(value))
            self._out += before + b"".join(map(_integer, value)) + after
            return None
        self._start(value)
        return self._in_tuple(value, partial(self._remember, value))

    def _in_tuple(self, values: tuple[Any, ...], then: Callable[[], None]) -> _Inside:
        before, after = _tuple_ends(len(values))
        self._out += before
        for value in values:
            inside = self._begin(value)
            if inside is not None:
                yield inside
        self._out += after
        then()

    def write_tensor(self, value: object) -> _Inside:
        walked, described = next(self._tensors)
        if walked is not value:
            raise SaveError("the object changed while it was being saved")
        self._start(value)
        inside = self._begin(described)
        if inside is not None:
            yield inside
        self._remember(value)


def _integer(value: int) -> bytes:
    """Return the opcode of an integer."""
    if 0 <= value < 1 << 8:
        return b"K%c" % value
    if 0 <= value < 1 << 16:
        return struct.pack("<cH", b"M", value)
    if -(1 << 31) <= value < 1 << 31:
        return struct.pack("<ci", b"J", value)
    encoded = pickle.encode_long(value)
    if len(encoded) > _LONGEST_INTEGER_BYTES:
        problem = "the integer is too large for torch.load"
        raise SaveError(problem, expected=f"at most {_LONGEST_INTEGER_BYTES} bytes", found=len(encoded))
    return b"\x8a%c" % len(encoded) + encoded


def _text(value: str) -> bytes:
    """Return the opcode of a string."""
    encoded = value.encode("utf-8", "surrogatepass")
    if len(encoded) > _LONGEST_TEXT_BYTES:
        raise SaveError("the string is too long for a pickle", expected=f"at most {_LONGEST_TEXT_BYTES} bytes")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _memo(opcodes: bytes, number: int) -> bytes:
    """Return the opcode that writes or reads a number of the memo; ``opcodes`` are its short and its long form."""
    return opcodes[:1] + b"%c" % number if number < 256 else opcodes[1:] + struct.pack("<I", number)


def _tuple_ends(length: int) -> tuple[bytes, bytes]:
    """Return the opcodes before and after the elements of a tuple."""
    return (b"", _SHORT_TUPLES[length]) if length < len(_SHORT_TUPLES) else (b"(", b"t")


def _device(kind: str, index: str = "") -> Call:
    return Call(Global("torch", "device"), (MemoizedText(kind), int(index)) if index else (MemoizedText(kind),))


def _torch_text(value: TorchText) -> Call | Global:
    if is_torch_name(value):
        return Global("torch", value.removeprefix("torch."))
    if value.startswith("torch."):  # safe: any text is only an argument of the call
        return layout(str(value))
    return _device(*value.split(":"))


def _torch_name(value: torch.dtype | torch.qscheme) -> Global:
    return Global("torch", str(value).removeprefix("torch."))


def _bytes(value: bytes | bytearray) -> Call:
    """Return a call: protocol 2 has no opcode for bytes."""
    return Call(Global("_codecs", "encode"), (value.decode("latin1"), MemoizedText("latin1")))


#: Opcodes of None and numbers, which are never memoized.
_SCALARS: Mapping[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _integer,
    float: lambda value: struct.pack(">cd", b"G", value),
}

#: Calls and names in place of plain values that the pickle has no opcodes for.
_REDUCED: Mapping[type, Callable[[Any], Call | Global]] = {
    complex: lambda value: Call(Global("__builtin__", "complex"), (value.real, value.imag)),
    bytes: _bytes,
    bytearray: lambda value: Call(Global("__builtin__", "bytearray"), (_bytes(value),)),
    set: lambda value: Call(Global("__builtin__", "set"), (elements(value),)),
    Counter: lambda value: Call(Global("collections", "Counter"), (dict(value),)),
    torch.Size: size,
    TorchSize: size,
    TorchText: _torch_text,
    torch.device: lambda value: _device(*str(value).split(":")),
    torch.layout: lambda value: layout(str(value)),
    torch.dtype: _torch_name,
    torch.qscheme: _torch_name,
}

#: Writes a value; of a container writes the beginning and returns an iterator over its values.
_Write: TypeAlias = Callable[[_Pickler, Any], _Inside | None]

_WRITERS: Mapping[type, _Write] = {
    **dict.fromkeys(_REDUCED, _Pickler.write_reduced),
    str: _Pickler.write_text,
    dict: _Pickler.write_dict,
    OrderedDict: _Pickler.write_ordered_dict,
    list: _Pickler.write_list,
    tuple: _Pickler.write_tuple,
    MemoizedText: _Pickler.write_constant,
    Global: _Pickler.write_global,
    Call: _Pickler.write_call,
    Persistent: _Pickler.write_persistent,
}

#: Types of values that objects may contain.
_PLAIN = {str, *_REDUCED}
