"""Values of a pickle that Python's own types do not describe, and opcodes of plain ones. Protocol 2; no torch."""

from __future__ import annotations

import pickle
import struct
from typing import Any, NamedTuple

from msgspec import Struct

from sluice._errors import SaveError

__all__ = ["Call", "Global", "MemoizedText", "Persistent", "integer", "memo", "text", "tuple_ends"]

#: Opcodes of tuples that need no mark, by length.
_SHORT_TUPLES = (b")", b"\x85", b"\x86", b"\x87")

#: Longest integer that torch reads, in bytes.
_LONGEST_INTEGER_BYTES = 255

_LONGEST_TEXT_BYTES = (1 << 32) - 1


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


def integer(value: int) -> bytes:
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


def text(value: str) -> bytes:
    """Return the opcode of a string."""
    encoded = value.encode("utf-8", "surrogatepass")
    if len(encoded) > _LONGEST_TEXT_BYTES:
        raise SaveError("the string is too long for a pickle", expected=f"at most {_LONGEST_TEXT_BYTES} bytes")
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def memo(opcodes: bytes, number: int) -> bytes:
    """Return the opcode that writes or reads a number of the memo; ``opcodes`` are its short and its long form."""
    return opcodes[:1] + b"%c" % number if number < 256 else opcodes[1:] + struct.pack("<I", number)


def tuple_ends(length: int) -> tuple[bytes, bytes]:
    """Return the opcodes before and after the elements of a tuple."""
    return (b"", _SHORT_TUPLES[length]) if length < len(_SHORT_TUPLES) else (b"(", b"t")
