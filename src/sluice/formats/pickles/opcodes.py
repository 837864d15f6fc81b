"""Opcode handlers: one for each opcode that ``torch.save`` emits in pickle protocols 2 to 5; all others are refused.

A handler takes the machine and the position after its opcode, and returns the position of the next opcode, or
``STOPPED``. The loop in ``unpickler`` maps ``IndexError`` (an empty stack or a missing memo entry), ``struct.error``
(the end of the data) and ``UnicodeDecodeError`` to errors of sluice.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Callable
from typing import TypeAlias

from sluice._errors import FormatError, LimitError, TruncatedError, UnsafeContentError, UnsupportedError
from sluice.formats.pickles.machine import Constructor, Consumed, Machine, PendingObject
from sluice.formats.pickles.tensor_opcodes import take_tensor

__all__ = ["HANDLERS", "STOPPED"]

Handler: TypeAlias = Callable[[Machine, int], int]

#: Return value of the STOP handler.
STOPPED = -1

#: Size of the largest integer in bytes, the limit of LONG1. Python refuses to print integers above 4,300 digits.
_MAX_INTEGER_BYTES = 255

_NEWEST_PROTOCOL = 5

_MARK = ord("(")

#: Placeholders in the memo that a GET replaces by their objects.
_PLACEHOLDERS = frozenset({Consumed, PendingObject})

_U8, _U16, _U32, _U64 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


def _protocol(machine: Machine, position: int) -> int:
    protocol = machine.data[position]
    if not 2 <= protocol <= _NEWEST_PROTOCOL:
        raise machine.error(UnsupportedError, f"unsupported pickle protocol {protocol}", position, expected="2 to 5")
    return position + 1


def _frame(machine: Machine, position: int) -> int:
    if position <= machine.frame_end:
        raise machine.error(FormatError, "a pickle frame starts inside another frame", position)
    start = position + _U64.size
    end: int = start + _U64.unpack_from(machine.data, position)[0]
    machine.check_end(start, end)
    machine.frame_end = machine.bound = end
    return start


def _stop(machine: Machine, position: int) -> int:
    if position < machine.frame_end or machine.frames or len(machine.stack) != 1:
        raise machine.error(FormatError, "the pickle stops before it is complete", position - 1)
    machine.end = position
    return STOPPED


def _push_mark(machine: Machine, position: int) -> int:
    start = position - 1
    after_tensor = take_tensor(machine, start) if machine.data[position] == _MARK else None
    if after_tensor is None:
        machine.mark(start)
        return position
    return after_tensor


def _constant(value: object) -> Handler:
    def push(machine: Machine, position: int) -> int:
        machine.stack.append(value)
        return position

    return push


def _empty(kind: type[object]) -> Handler:
    def push(machine: Machine, position: int) -> int:
        machine.stack.append(kind())
        return position

    return push


def _number(layout: struct.Struct) -> Handler:
    unpack, size = layout.unpack_from, layout.size

    def push(machine: Machine, position: int) -> int:
        machine.stack.append(unpack(machine.data, position)[0])
        return position + size

    return push


def _long(layout: struct.Struct) -> Handler:
    def push(machine: Machine, position: int) -> int:
        nbytes: int = layout.unpack_from(machine.data, position)[0]
        start = position + layout.size
        if not 0 <= nbytes <= _MAX_INTEGER_BYTES:
            raise machine.error(LimitError, f"the length of an integer is out of range: {nbytes} bytes", position)
        if start + nbytes > machine.bound:
            machine.check_end(start, start + nbytes)
        machine.stack.append(int.from_bytes(machine.data[start : start + nbytes], "little", signed=True))
        return start + nbytes

    return push


def _text(layout: struct.Struct) -> Handler:
    unpack, size = layout.unpack_from, layout.size

    def push(machine: Machine, position: int) -> int:
        start = position + size
        end: int = start + unpack(machine.data, position)[0]
        if end > machine.bound:
            machine.check_end(start, end)
        machine.stack.append(machine.data[start:end].decode())
        return end

    return push


def _binary(layout: struct.Struct, kind: type[bytes | bytearray]) -> Handler:
    def push(machine: Machine, position: int) -> int:
        start = position + layout.size
        end: int = start + layout.unpack_from(machine.data, position)[0]
        if end > machine.bound:
            machine.check_end(start, end)
        machine.stack.append(kind(machine.data[start:end]))
        return end

    return push


def _put(layout: struct.Struct) -> Handler:
    unpack, size = layout.unpack_from, layout.size

    def put(machine: Machine, position: int) -> int:
        index = unpack(machine.data, position)[0]
        memo = machine.memo
        if index == len(memo):
            memo.append(machine.stack[-1])
        else:
            machine.store(index, position)
        return position + size

    return put


def _memoize(machine: Machine, position: int) -> int:
    machine.memo.append(machine.stack[-1])
    return position


def _get(layout: struct.Struct) -> Handler:
    unpack, size = layout.unpack_from, layout.size

    def get(machine: Machine, position: int) -> int:
        index = unpack(machine.data, position)[0]
        value = machine.memo[index]
        machine.stack.append(machine.fetch(index, position) if type(value) in _PLACEHOLDERS else value)
        return position + size

    return get


def _tuple(count: int) -> Handler:
    def build(machine: Machine, position: int) -> int:
        stack = machine.stack
        if len(stack) < count:
            raise IndexError
        stack[-count:] = [tuple(stack[-count:])]
        return position

    return build


def _tuple_of_one(machine: Machine, position: int) -> int:
    stack = machine.stack
    stack[-1] = (stack[-1],)
    return position


def _marked_tuple(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    machine.stack.append(tuple(items))
    return position


def _append(machine: Machine, position: int) -> int:
    value = machine.stack.pop()
    _extend(machine, [value], position)
    return position


def _appends(machine: Machine, position: int) -> int:
    _extend(machine, machine.pop_mark(), position)
    return position


def _extend(machine: Machine, items: list[object], position: int) -> None:
    target = machine.stack[-1]
    if type(target) is list:
        target.extend(items)
    else:
        machine.check_inert(target, "elements", position)


def _set_item(machine: Machine, position: int) -> int:
    value, key = machine.stack.pop(), machine.stack.pop()
    machine.fill(machine.stack[-1], [key, value], position)
    return position


def _set_items(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    machine.fill(machine.stack[-1], items, position)
    return position


def _add_items(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    target = machine.stack[-1]
    if type(target) is set:
        for item in items:
            machine.check_key(item, position)
            target.add(item)
    else:
        machine.check_inert(target, "elements", position)
    return position


def _frozen_set(machine: Machine, position: int) -> int:
    items = machine.pop_mark()
    for item in items:
        machine.check_key(item, position)
    machine.stack.append(frozenset(items))
    return position


def _global(machine: Machine, position: int) -> int:
    data = machine.data
    middle = data.find(b"\n", position)
    end = data.find(b"\n", middle + 1)
    if middle < 0 or end < 0:
        raise machine.error(TruncatedError, "the pickle ends inside the name of a global", position)
    _push_global(machine, data[position:middle].decode(), data[middle + 1 : end].decode(), position)
    return end + 1


def _stack_global(machine: Machine, position: int) -> int:
    name, module = machine.stack.pop(), machine.stack.pop()
    if type(name) is not str or type(module) is not str:
        raise machine.error(FormatError, "the name of a global is not text", position)
    _push_global(machine, module, name, position)
    return position


def _push_global(machine: Machine, module: str, name: str, position: int) -> None:
    if len(module) + len(name) > machine.limits.name_bytes:
        raise machine.error(LimitError, "the name of a global is too long", position)
    machine.stack.append(machine.find(module, name))


def _reduce(machine: Machine, position: int) -> int:
    arguments = machine.stack.pop()
    machine.stack[-1] = machine.call(machine.stack[-1], arguments, position)
    return position


def _new_object(machine: Machine, position: int) -> int:
    arguments = machine.stack.pop()
    kind = machine.stack[-1]
    if type(kind) is Constructor and kind.creates:
        machine.stack[-1] = machine.call(kind, arguments, position)
    else:
        machine.check_inert(kind, "constructor arguments", position)
    return position


def _build(machine: Machine, position: int) -> int:
    state = machine.stack.pop()
    target = machine.stack[-1]
    if type(target) is OrderedDict and type(state) is dict:
        # Only this attribute is set: one named "items" would hide the method.
        if "_metadata" in state:
            target._metadata = state["_metadata"]  # type: ignore[attr-defined]  # noqa: SLF001 - torch's own name
    elif type(target) is PendingObject:
        machine.stack[-1] = machine.finish(target, state, position)
    else:
        machine.check_inert(target, "attributes", position)
    return position


def _persistent(machine: Machine, position: int) -> int:
    machine.stack[-1] = machine.resolve(machine.stack[-1], position)
    return position


def _refuse(machine: Machine, position: int) -> int:
    import pickletools  # only for the name of the opcode in the message

    code = machine.data[position - 1]
    known = next((opcode for opcode in pickletools.opcodes if opcode.code == chr(code)), None)
    name = known.name if known else f"0x{code:02x}"
    problem = f"the pickle uses opcode {name}, which torch.save never writes"
    raise machine.error(UnsafeContentError, problem, position - 1)


_PERMITTED: dict[bytes, Handler] = {
    b"\x80": _protocol,
    b"\x95": _frame,
    b".": _stop,
    b"(": _push_mark,
    b"N": _constant(None),
    b"\x88": _constant(True),
    b"\x89": _constant(False),
    b")": _constant(()),
    b"]": _empty(list),
    b"}": _empty(dict),
    b"\x8f": _empty(set),
    b"J": _number(_I32),
    b"K": _number(_U8),
    b"M": _number(_U16),
    b"G": _number(_F64),
    b"\x8a": _long(_U8),
    b"\x8b": _long(_I32),
    b"X": _text(_U32),
    b"U": _text(_U8),  # SHORT_BINSTRING: text from Python 2
    b"\x8c": _text(_U8),
    b"\x8d": _text(_U64),
    b"B": _binary(_U32, bytes),
    b"C": _binary(_U8, bytes),
    b"\x8e": _binary(_U64, bytes),
    b"\x96": _binary(_U64, bytearray),
    b"q": _put(_U8),
    b"r": _put(_U32),
    b"\x94": _memoize,
    b"h": _get(_U8),
    b"j": _get(_U32),
    b"\x85": _tuple_of_one,
    b"\x86": _tuple(2),
    b"\x87": _tuple(3),
    b"t": _marked_tuple,
    b"a": _append,
    b"e": _appends,
    b"s": _set_item,
    b"u": _set_items,
    b"\x90": _add_items,
    b"\x91": _frozen_set,
    b"c": _global,
    b"\x93": _stack_global,
    b"R": _reduce,
    b"\x81": _new_object,
    b"b": _build,
    b"Q": _persistent,
}

#: The handler of each opcode, by its byte.
HANDLERS: tuple[Handler, ...] = tuple(_PERMITTED.get(bytes([code]), _refuse) for code in range(256))
