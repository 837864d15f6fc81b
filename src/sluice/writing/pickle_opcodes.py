"""Writer of pickle protocol 2 opcodes, for the values that ``torch.load(weights_only=True)`` accepts. No torch.

Python's pickler memoizes every object, which takes memory in proportion to their number. Here the caller decides what
to memoize: names of functions, and objects that occur more than once.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Hashable
from typing import Any, NamedTuple

from msgspec import Struct

from sluice._errors import SaveError

__all__ = ["Call", "Global", "MemoizedText", "Persistent", "PickleOpcodes"]

_PROTOCOL = b"\x80\x02"
_STOP = b"."

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


class PickleOpcodes:
    """A pickle under construction. Each method appends one value unless documented otherwise."""

    MARK = b"("
    APPENDS = b"e"
    SETITEMS = b"u"
    BUILD = b"b"
    EMPTY_LIST = b"]"
    EMPTY_DICT = b"}"

    def __init__(self) -> None:
        #: The bytes so far.
        self.out = bytearray(_PROTOCOL)
        self._memo: dict[Hashable, int] = {}

    def finish(self) -> bytearray:
        """End the pickle and return it."""
        self.out += _STOP
        return self.out

    def recall(self, key: Hashable) -> bool:
        """Append the value memoized under a key; return whether there is one."""
        number = self._memo.get(key)
        if number is None:
            return False
        self.out += b"h%c" % number if number < 256 else b"j" + struct.pack("<I", number)
        return True

    def remember(self, key: Hashable) -> None:
        """Memoize the last value under a key."""
        number = self._memo[key] = len(self._memo)
        self.out += b"q%c" % number if number < 256 else b"r" + struct.pack("<I", number)

    def named(self, module: str, name: str) -> None:
        """Append a global of a module; memoized."""
        if not self.recall((module, name)):
            self.out += f"c{module}\n{name}\n".encode()
            self.remember((module, name))

    def none(self) -> None:
        self.out += b"N"

    def boolean(self, value: bool) -> None:  # noqa: FBT001  (the value itself)
        self.out += b"\x88" if value else b"\x89"

    def integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += b"K%c" % value
        elif 0 <= value < 1 << 16:
            self.out += struct.pack("<cH", b"M", value)
        elif -(1 << 31) <= value < 1 << 31:
            self.out += struct.pack("<ci", b"J", value)
        else:
            encoded = pickle.encode_long(value)
            if len(encoded) > _LONGEST_INTEGER_BYTES:
                problem = "the integer is too large for torch.load"
                raise SaveError(problem, expected=f"at most {_LONGEST_INTEGER_BYTES} bytes", found=len(encoded))
            self.out += b"\x8a%c" % len(encoded) + encoded

    def floating(self, value: float) -> None:
        self.out += struct.pack(">cd", b"G", value)

    def text(self, value: str) -> None:
        encoded = value.encode("utf-8", "surrogatepass")
        if len(encoded) > _LONGEST_TEXT_BYTES:
            raise SaveError("the string is too long for a pickle", expected=f"at most {_LONGEST_TEXT_BYTES} bytes")
        self.out += b"X" + struct.pack("<I", len(encoded))
        self.out += encoded

    def constant(self, value: str) -> None:
        """Append a string; memoized."""
        if not self.recall(value):
            self.text(value)
            self.remember(value)

    def integers(self, values: tuple[int, ...]) -> None:
        """Append a tuple of integers."""
        self.open_tuple(len(values))
        for value in values:
            self.integer(value)
        self.close_tuple(len(values))

    def open_tuple(self, length: int) -> None:
        """Begin a tuple, before its elements; append no value."""
        if length >= len(_SHORT_TUPLES):
            self.out += self.MARK

    def close_tuple(self, length: int) -> None:
        """Combine the last ``length`` values into a tuple."""
        self.out += _SHORT_TUPLES[length] if length < len(_SHORT_TUPLES) else b"t"

    def reduce(self) -> None:
        """Call the second-last value with the last, a tuple of arguments."""
        self.out += b"R"

    def persistent(self) -> None:
        """Replace the last value, a persistent id, by its object."""
        self.out += b"Q"
