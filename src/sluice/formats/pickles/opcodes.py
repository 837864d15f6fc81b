"""Opcode handlers: one for each opcode that ``torch.save`` emits in pickle protocols 1 to 5; all others are refused.

A handler takes the machine and the position after its opcode, and returns the position of the next opcode, or
``STOPPED``. The loop in ``unpickler`` maps ``IndexError`` (an empty stack or a missing memo entry), ``struct.error``
(the end of the data) and ``UnicodeDecodeError`` to errors of sluice.
"""

from __future__ import annotations

import struct
from collections import OrderedDict

from sluice._errors import TRUST_TORCH, FormatError, LimitError, TruncatedError, UnsafeContentError, UnsupportedError
from sluice.formats.pickles.machine import Constructor, Consumed, Machine, PendingObject
from sluice.formats.pickles.tensor_opcodes import take_tensor
from sluice.formats.pickles.value_opcodes import VALUE_HANDLERS, Handler

__all__ = ["HANDLERS", "STOPPED"]

#: Return value of the STOP handler.
STOPPED = -1

#: Opcodes that import or call something and that neither torch.save nor its pickler writes.
_CALLING = frozenset({"INST", "OBJ", "NEWOBJ_EX", "EXT1", "EXT2", "EXT4"})

_NEWEST_PROTOCOL = 5

_MARK = ord("(")

_U8, _U32, _U64 = struct.Struct("<B"), struct.Struct("<I"), struct.Struct("<Q")

#: Placeholders in the memo that a GET replaces by their objects.
_PLACEHOLDERS = frozenset({Consumed, PendingObject})


def _protocol(machine: Machine, position: int) -> int:
    protocol = machine.data[position]
    if not 1 <= protocol <= _NEWEST_PROTOCOL:
        raise machine.error(UnsupportedError, f"unsupported pickle protocol {protocol}", position, expected="1 to 5")
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
    _extend(machine, [machine.stack.pop()], position)
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
    if known is None:
        raise machine.error(FormatError, f"byte 0x{code:02x} is not a pickle opcode", position - 1)
    problem = f"the pickle uses opcode {known.name} of protocol {known.proto}"
    if known.name in _CALLING:
        raise machine.error(
            UnsafeContentError, f"{problem}, which names code and which torch never writes", position - 1
        )
    raise machine.error(UnsupportedError, f"{problem}, which sluice does not read", position - 1, advice=TRUST_TORCH)


_PERMITTED: dict[bytes, Handler] = {
    **VALUE_HANDLERS,
    b"\x80": _protocol,
    b"\x95": _frame,
    b".": _stop,
    b"(": _push_mark,
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
