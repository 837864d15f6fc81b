"""Which values may be keys of dicts and elements of sets when a file chooses them.

Filling a dict is quadratic when its keys collide, and hashing a nested tuple recurses in C until the stack is gone.
The hashes of text and bytes are seeded by the process, so that a file cannot choose them.
"""

from __future__ import annotations

from sluice._errors import LimitError, UnsupportedError
from sluice._options import Limits
from sluice.records import TorchText

__all__ = ["KeyGuard"]

#: Integers that are their own hash. Larger ones can be chosen so that all of them collide.
_PLAIN_HASHES = range(-(2**61) + 2, 2**61 - 1)

#: Tuples can be chosen to collide too, with more effort: so many take a few milliseconds at worst.
_MAX_TUPLES = 4_096

_MAX_TUPLE_ELEMENTS = 16

_KINDS = frozenset({str, TorchText, bytes, int, float, bool, type(None)})


class KeyGuard:
    """Checks the keys of one pickle."""

    def __init__(self, limits: Limits) -> None:
        self._max_name = limits.name_bytes
        self._tuples = 0

    def check(self, key: object) -> None:
        """Check that hashing ``key`` is bounded and cannot be made to collide with many others.

        Raises:
            LimitError: It is too long, an integer too large, or one tuple too many.
            UnsupportedError: It is neither a plain value nor a flat tuple of plain values.
        """
        parts: tuple[object, ...] = (key,)
        if isinstance(key, tuple) and len(key) <= _MAX_TUPLE_ELEMENTS:
            self._tuples += 1
            if self._tuples > _MAX_TUPLES:
                raise LimitError(f"the pickle uses more than {_MAX_TUPLES} tuples as keys")
            parts = key
        for part in parts:
            if type(part) not in _KINDS:
                raise UnsupportedError(f"a key of type {type(part).__name__}")
            if isinstance(part, str) and len(part) > self._max_name:
                raise LimitError(f"a key is longer than {self._max_name} characters")
            if type(part) is int and part not in _PLAIN_HASHES:
                raise LimitError("a key is an integer of more than 61 bits")
