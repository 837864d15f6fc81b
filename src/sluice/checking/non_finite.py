"""Counts of NaN and infinite elements of bytes that arrive in pieces."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sluice._dtypes import ITEM_BYTES, torch_dtype

__all__ = ["NonFiniteCounter", "WholeItems", "has_non_finite"]

#: Elements tested together, so that temporary tensors stay in the cache of a processor.
_BLOCK_ELEMENTS = 1 << 15

#: Dtype of both parts of the elements of complex dtypes.
_PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

#: Dtypes without NaN and infinity.
_FINITE = {"float4_e2m1fn_x2"}


def has_non_finite(dtype: str) -> bool:
    """Return whether elements of a dtype can be NaN or infinite."""
    return dtype in _PARTS or (torch_dtype(dtype).is_floating_point and dtype not in _FINITE)


class WholeItems:
    """Splits bytes that arrive in pieces of any length at the ends of items; keeps the start of an incomplete item."""

    def __init__(self, item_bytes: int) -> None:
        """Start a stream of items of ``item_bytes`` bytes."""
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
        """Start at zero for a dtype of which ``has_non_finite`` is true."""
        self.nan = 0
        self.inf = 0
        self._parts = 2 if dtype in _PARTS else 1
        self._dtype = torch_dtype(_PARTS.get(dtype, dtype))
        self._items = WholeItems(ITEM_BYTES[dtype])

    def update(self, data: memoryview) -> None:
        """Receive the next bytes, which may begin and end inside an element."""
        for whole in self._items.take(data):
            step = _BLOCK_ELEMENTS * self._parts * self._dtype.itemsize
            for first in range(0, len(whole), step):
                self._count(whole[first : first + step])

    def _count(self, data: memoryview) -> None:
        raw = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
        numbers = raw.view(self._dtype).view(-1, self._parts)
        if numbers.element_size() == 1:  # torch computes nothing else of them
            numbers = numbers.float()
        if not numbers.isfinite().all():
            self.nan += int(numbers.isnan().any(1).sum())
            self.inf += int(numbers.isinf().any(1).sum())
