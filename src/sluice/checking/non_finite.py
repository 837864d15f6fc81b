"""Counts of NaN and infinite elements, from the bits of bytes that arrive in pieces.

Bits are compared as integers, because numpy does not have all dtypes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from msgspec import Struct

from sluice._dtypes import ITEM_BYTES

__all__ = ["NonFiniteCounter", "WholeItems", "has_non_finite"]

#: Elements tested together, so that temporary arrays stay in the cache of a processor.
_BLOCK_ELEMENTS = 1 << 17


class _Bits(Struct, frozen=True):
    """The bit patterns of NaN and infinity of a real dtype."""

    #: Mask without the sign bit, if that is not significant.
    mask: int
    #: Masked bits of infinity; None for a dtype without infinities.
    infinity: int | None
    #: Lowest and highest masked bits of NaN.
    nan: tuple[int, int]


_BITS = {
    "float64": _Bits(0x7FFF_FFFF_FFFF_FFFF, 0x7FF0_0000_0000_0000, (0x7FF0_0000_0000_0001, 0x7FFF_FFFF_FFFF_FFFF)),
    "float32": _Bits(0x7FFF_FFFF, 0x7F80_0000, (0x7F80_0001, 0x7FFF_FFFF)),
    "float16": _Bits(0x7FFF, 0x7C00, (0x7C01, 0x7FFF)),
    "bfloat16": _Bits(0x7FFF, 0x7F80, (0x7F81, 0x7FFF)),
    "float8_e5m2": _Bits(0x7F, 0x7C, (0x7D, 0x7F)),
    "float8_e4m3fn": _Bits(0x7F, None, (0x7F, 0x7F)),
    "float8_e5m2fnuz": _Bits(0xFF, None, (0x80, 0x80)),
    "float8_e4m3fnuz": _Bits(0xFF, None, (0x80, 0x80)),
    "float8_e8m0fnu": _Bits(0xFF, None, (0xFF, 0xFF)),
}
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}


def has_non_finite(dtype: str) -> bool:
    """Return whether elements of a dtype can be NaN or infinite."""
    return _PARTS.get(dtype, dtype) in _BITS


class WholeItems:
    """Splits bytes that arrive in pieces of any length at the ends of items; keeps the start of an incomplete item."""

    def __init__(self, item_bytes: int) -> None:
        """Start a stream.

        Args:
            item_bytes: Bytes of one item.
        """
        self._item = item_bytes
        self._rest = b""

    def take(self, data: memoryview) -> Iterator[memoryview]:
        """Receive the next bytes, and yield the complete items, in order."""
        if self._rest:
            missing = self._item - len(self._rest)
            self._rest += bytes(data[:missing])
            data = data[missing:]
            if len(self._rest) < self._item:
                return
            yield memoryview(self._rest)
        whole = len(data) // self._item * self._item
        self._rest = bytes(data[whole:])
        yield data[:whole]


class NonFiniteCounter:
    """Counts elements that are NaN or infinite. A complex element counts for either part, and can count as both."""

    def __init__(self, dtype: str) -> None:
        """Start at zero.

        Args:
            dtype: A dtype for which ``has_non_finite`` is true.
        """
        self.nan = 0
        self.inf = 0
        self._parts = 2 if dtype in _PARTS else 1
        self._bits = _BITS[_PARTS.get(dtype, dtype)]
        self._unsigned = np.dtype(f"<u{ITEM_BYTES[dtype] // self._parts}")
        self._items = WholeItems(ITEM_BYTES[dtype])

    def update(self, data: memoryview) -> None:
        """Receive the next bytes, which may begin and end inside an element."""
        for whole in self._items.take(data):
            self._count(whole)

    def _count(self, data: memoryview) -> None:
        numbers = np.frombuffer(data, dtype=self._unsigned)
        step = _BLOCK_ELEMENTS * self._parts
        mask = self._unsigned.type(self._bits.mask)
        low, high = map(self._unsigned.type, self._bits.nan)
        for first in range(0, len(numbers), step):
            block = numbers[first : first + step] & mask
            if block.max() < min(self._bits.nan[0], self._bits.infinity or self._bits.nan[0]):
                continue  # nearly every block
            self.nan += self._elements((block >= low) & (block <= high))
            if self._bits.infinity is not None:
                self.inf += self._elements(block == self._unsigned.type(self._bits.infinity))

    def _elements(self, hits: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
        return int(np.count_nonzero(hits.reshape(-1, self._parts).any(axis=1) if self._parts > 1 else hits))
