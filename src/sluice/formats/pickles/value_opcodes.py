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

#: No bound but the data itself, which ``Machine.check_end`` checks.
_ANY_LENGTH = 2**64

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


def _sized(layout: struct.Struct, make: Callable[[Machine, int, int], object], *, most: int = _ANY_LENGTH) -> Handler:
    """Return the handler of values after their length, which ``make`` builds from their start and end in the data."""
    unpack, size = layout.unpack_from, layout.size

    def push(machine: Machine, position: int) -> int:
        start = position + size
        nbytes: int = unpack(machine.data, position)[0]
        if not 0 <= nbytes <= most:
            raise machine.error(LimitError, f"the length of a value is out of range: {nbytes} bytes", position)
        if start + nbytes > machine.bound:
            machine.check_end(start, start + nbytes)
        machine.stack.append(make(machine, start, start + nbytes))
        return start + nbytes

    return push


def _integer(machine: Machine, start: int, end: int) -> int:
    return int.from_bytes(machine.data[start:end], "little", signed=True)


def _text(machine: Machine, start: int, end: int) -> str:
    # Pickles hold lone surrogates, for example of file names that are not UTF-8, as if they were characters.
    return machine.data[start:end].decode("utf-8", "surrogatepass")


def _text_of_python2(machine: Machine, start: int, end: int) -> str | bytes:
    return machine.text_of_python2(machine.data[start:end], start)


def _bytes(machine: Machine, start: int, end: int) -> bytes:
    return machine.data[start:end]


def _bytearray(machine: Machine, start: int, end: int) -> bytearray:
    return bytearray(machine.data[start:end])


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
    b"\x8a": _sized(_U8, _integer, most=_MAX_INTEGER_BYTES),
    b"\x8b": _sized(_I32, _integer, most=_MAX_INTEGER_BYTES),
    b"X": _sized(_U32, _text),
    b"U": _sized(_U8, _text_of_python2),
    b"T": _sized(_I32, _text_of_python2),
    b"\x8c": _sized(_U8, _text),
    b"\x8d": _sized(_U64, _text),
    b"B": _sized(_U32, _bytes),
    b"C": _sized(_U8, _bytes),
    b"\x8e": _sized(_U64, _bytes),
    b"\x96": _sized(_U64, _bytearray),
}
