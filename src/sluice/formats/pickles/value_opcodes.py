"""Opcode handlers that push a value: constants, empty containers, numbers, text and bytes.

Text is UTF-8 in all pickles of Python 3. Python 2 pickles its ``str`` as bytes without an encoding.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from typing import TypeAlias

from sluice._errors import FormatError, LimitError, TruncatedError
from sluice.formats.pickles.machine import Machine

__all__ = ["VALUE_HANDLERS", "Handler"]

Handler: TypeAlias = Callable[[Machine, int], int]

#: Size of the largest integer in bytes, the limit of LONG1. Python refuses to print integers above 4,300 digits.
_MAX_INTEGER_BYTES = 255

#: Most characters of an integer in decimal, with sign, suffix and line feed; enough for 255 bytes.
_MAX_INTEGER_CHARACTERS = 620

#: An integer in decimal. Python 2 marks those of its type long.
_DECIMAL = re.compile(rb"-?[0-9]+L?")

#: Protocol 1 writes bools as integers with two digits.
_BOOLS = {b"00": False, b"01": True}

_U8, _U16, _U32, _U64 = struct.Struct("<B"), struct.Struct("<H"), struct.Struct("<I"), struct.Struct("<Q")
_I32, _F64 = struct.Struct("<i"), struct.Struct(">d")


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


def _decimal(machine: Machine, position: int) -> int:
    """Push an integer in decimal: of protocol 1, or of more than 32 bits from Python 2."""
    end = machine.data.find(b"\n", position, position + _MAX_INTEGER_CHARACTERS)
    if end < 0 and len(machine.data) - position < _MAX_INTEGER_CHARACTERS:
        raise machine.error(TruncatedError, "the pickle ends inside an integer", position)
    line = machine.data[position:end]
    if end < 0 or not _DECIMAL.fullmatch(line):
        raise machine.error(FormatError, "an integer is not in decimal, or too long", position, found=line[:40])
    if end >= machine.bound:
        machine.check_end(position, end + 1)
    machine.stack.append(_BOOLS[line] if line in _BOOLS else int(line.rstrip(b"L")))
    return end + 1


def _text(layout: struct.Struct) -> Handler:
    unpack, size = layout.unpack_from, layout.size

    def push(machine: Machine, position: int) -> int:
        start = position + size
        end: int = start + unpack(machine.data, position)[0]
        if end > machine.bound:
            machine.check_end(start, end)
        # Pickles hold lone surrogates, for example of file names that are not UTF-8, as if they were characters.
        machine.stack.append(machine.data[start:end].decode("utf-8", "surrogatepass"))
        return end

    return push


def _text_of_python2(layout: struct.Struct) -> Handler:
    def push(machine: Machine, position: int) -> int:
        start = position + layout.size
        nbytes: int = layout.unpack_from(machine.data, position)[0]
        if nbytes < 0:
            raise machine.error(FormatError, "text has a negative length", position, found=nbytes)
        if start + nbytes > machine.bound:
            machine.check_end(start, start + nbytes)
        machine.stack.append(machine.text_of_python2(machine.data[start : start + nbytes], start))
        return start + nbytes

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


#: The handler of each opcode that pushes a value, by its byte.
VALUE_HANDLERS: Mapping[bytes, Handler] = {
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
    b"I": _decimal,
    b"L": _decimal,
    b"\x8a": _long(_U8),
    b"\x8b": _long(_I32),
    b"X": _text(_U32),
    b"U": _text_of_python2(_U8),
    b"T": _text_of_python2(_I32),
    b"\x8c": _text(_U8),
    b"\x8d": _text(_U64),
    b"B": _binary(_U32, bytes),
    b"C": _binary(_U8, bytes),
    b"\x8e": _binary(_U64, bytes),
    b"\x96": _binary(_U64, bytearray),
}
