"""What bytes say as numbers: NaN and infinities by their bits, in pieces. No torch: some dtypes numpy does not have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sluice._dtypes import ITEM_BYTES

__all__ = ["NonFiniteCounter", "WholeItems", "has_non_finite"]

#: Elements looked at together: their copies stay in a processor's cache.
_BLOCK_ELEMENTS = 1 << 17


@dataclass(frozen=True, slots=True)
class _Bits:
    """Which bits of a real number make it NaN or infinite."""

    #: Bits that are looked at.
    mask: int
    #: These bits, where it is infinite; None for a dtype without infinities.
    infinity: int | None
    #: The lowest and the highest of them that are NaN.
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
    """Return whether numbers of a dtype can be NaN or infinite."""
    return _PARTS.get(dtype, dtype) in _BITS


class WholeItems:
    """Cuts bytes that come in pieces of any length at the ends of items; the start of an item waits for the rest."""

    def __init__(self, item_bytes: int) -> None:
        """Begin with nothing.

        Args:
            item_bytes: Bytes of one item.
        """
        self._item = item_bytes
        self._rest = b""

    def take(self, data: memoryview) -> Iterator[memoryview]:
        """Take the next bytes, and yield what is whole now, in order."""
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
    """Counts the elements that are NaN, or infinite; of a complex one either part decides, and it can be both."""

    def __init__(self, dtype: str) -> None:
        """Begin with none.

        Args:
            dtype: One for which ``has_non_finite`` is true.
        """
        self.nan = 0
        self.inf = 0
        self._parts = 2 if dtype in _PARTS else 1
        self._bits = _BITS[_PARTS.get(dtype, dtype)]
        self._unsigned = np.dtype(f"<u{ITEM_BYTES[dtype] // self._parts}")
        self._items = WholeItems(ITEM_BYTES[dtype])

    def update(self, data: memoryview) -> None:
        """Take the next bytes, which may begin and end inside an element."""
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
                continue  # nearly always
            self.nan += self._elements((block >= low) & (block <= high))
            if self._bits.infinity is not None:
                self.inf += self._elements(block == self._unsigned.type(self._bits.infinity))

    def _elements(self, found: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> int:
        return int(np.count_nonzero(found.reshape(-1, self._parts).any(axis=1) if self._parts > 1 else found))
