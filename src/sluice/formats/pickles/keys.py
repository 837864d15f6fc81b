"""Checks of the dict keys and set elements in a pickle, which the file chooses.

Filling a dict takes quadratic time if its keys collide, and hashing a nested tuple recurses in C until the stack
overflows. Python seeds the hashes of text and bytes per process, so a file cannot make those collide.

Limits: ``Limits.name_bytes`` for text, 61 bits for integers, 4,096 tuples of at most 16 elements. Refused: other types,
nested tuples included.
"""

from __future__ import annotations

from sluice._errors import LimitError, UnsupportedError
from sluice._options import Limits
from sluice.records import TorchText

__all__ = ["KeyGuard"]

#: Integers that are their own hash. Larger integers can be chosen so that all of them collide.
_PLAIN_HASHES = range(-(2**61) + 2, 2**61 - 1)

#: Maximum number of tuples. They can be made to collide too; 4,096 colliding tuples take a few milliseconds.
_MAX_TUPLES = 4_096

_MAX_TUPLE_ELEMENTS = 16

_KINDS = frozenset({str, TorchText, bytes, int, float, bool, type(None)})


class KeyGuard:
    """Checks of the keys in one pickle."""

    def __init__(self, limits: Limits) -> None:
        self._max_name = limits.name_bytes
        self._tuples = 0

    def check(self, key: object) -> None:
        """Check that hashing ``key`` takes bounded time and that it cannot collide with many other keys.

        Raises:
            LimitError: The key is too long or too large, or there are too many tuples.
            UnsupportedError: The key is neither a plain value nor a flat tuple of plain values.
        """
        parts: tuple[object, ...] = (key,)
        if isinstance(key, tuple) and len(key) <= _MAX_TUPLE_ELEMENTS:
            self._tuples += 1
            if self._tuples > _MAX_TUPLES:
                raise LimitError(f"the pickle uses more than {_MAX_TUPLES} tuples as keys")
            parts = key
        for part in parts:
            if type(part) not in _KINDS:
                raise UnsupportedError(f"a key has the unsupported type {type(part).__name__}")
            if isinstance(part, str) and len(part) > self._max_name:
                raise LimitError(f"a key is longer than {self._max_name} characters")
            if type(part) is int and part not in _PLAIN_HASHES:
                raise LimitError("a key is an integer of more than 61 bits")
