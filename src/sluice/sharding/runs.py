"""The consecutive elements of a region in the row-major order of the whole tensor.

A rank holds the elements of its region in row-major order of the region. In a file with the whole tensor these elements
are runs of consecutive elements: one run for rows, a run for each row of columns. Runs are numbered in the order of the
region, and computed in batches, because a region of a single column has as many runs as elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from sluice.sharding.regions import Region, shape_of

__all__ = ["Runs"]

_Integers: TypeAlias = npt.NDArray[np.int64]

#: Most runs of one batch: three arrays of 128 KiB.
_BATCH = 1 << 14


class Runs:
    """The runs of one region.

    Example:
        >>> [starts.tolist() for starts, counts in Runs((2, 4), (((0, 2),), ((1, 3),))).within(0, 4)]
        [[1, 5]]
    """

    def __init__(self, shape: Sequence[int], region: Region) -> None:
        """Prepare to compute runs.

        Args:
            shape: Shape of the whole tensor.
            region: A region of it.
        """
        #: Number of elements of the region.
        self.elements = prod(shape_of(region))
        cut = [dim for dim, size in enumerate(shape) if region[dim] != ((0, size),)]
        last = cut[-1] if cut else 0
        inner = prod(shape[last + 1 :])
        intervals = region[last] if region else ((0, 1),)
        self._starts = np.array([start * inner for start, _ in intervals], np.int64)
        self._ends = np.cumsum([(stop - start) * inner for start, stop in intervals], dtype=np.int64)
        self._row = int(self._ends[-1]) if len(self._ends) else 0
        # Position in the tensor of each selected index of the dimensions before the last one that is cut.
        self._outer = [
            np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in region[dim]])
            * prod(shape[dim + 1 :])
            for dim in range(last if self.elements else 0)
        ]

    def within(self, first: int, last: int) -> Iterator[tuple[_Integers, _Integers]]:
        """Yield the runs of some elements, in batches: first elements in the tensor, and numbers of elements.

        Args:
            first: Number of the first element, in row-major order of the region.
            last: One past the number of the last element.
        """
        if first >= last:
            return
        count = len(self._ends)
        begin, end = self._run_of(first), self._run_of(last - 1) + 1
        for number in range(begin, end, _BATCH):
            runs = np.arange(number, min(number + _BATCH, end), dtype=np.int64)
            rows, kinds = runs // count, runs % count
            stops = rows * self._row + self._ends[kinds]
            starts = rows * self._row + np.where(kinds, self._ends[kinds - 1], 0)
            skipped = np.maximum(first - starts, 0)
            counts = np.minimum(stops, last) - starts - skipped
            yield self._starts[kinds] + self._offsets(rows) + skipped, counts

    def _run_of(self, element: int) -> int:
        row, rest = divmod(element, self._row)
        return row * len(self._ends) + int(np.searchsorted(self._ends, rest, side="right"))

    def _offsets(self, rows: _Integers) -> _Integers:
        """Return the position in the tensor of each row: a combination of indices of the outer dimensions."""
        offsets = np.zeros(len(rows), np.int64)
        for positions in reversed(self._outer):
            rows, index = np.divmod(rows, len(positions))
            offsets += positions[index]
        return offsets
