"""Checks that the indices of a sparse tensor are inside it and in order.

The rules are those of torch's ``check_invariants``. Indices are passed in pieces, from memory or while they are
read from a file, so that a check takes a constant amount of memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from sluice._defaults import CAST_PIECE_ELEMENTS
from sluice._errors import FormatError
from sluice.records import Entry, Sparse

__all__ = ["check_indices", "index_lines", "pieces_of"]


def index_lines(composite: Sparse) -> list[Entry]:
    """Return the index tensors that are checked: one per dimension for COO, else the compressed and plain ones."""
    if composite.layout != "sparse_coo":
        return list(composite.indices)
    (indices,) = composite.indices
    dims, count = indices.shape
    step, across = indices.stride
    return [
        Entry(
            elements=indices.elements,
            shape=(count,),
            stride=(across,),
            storage=indices.storage,
            storage_offset=indices.storage_offset + dim * step,
        )
        for dim in range(dims)
    ]


def pieces_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the elements of a tensor in row-major order."""
    yield from torch.split(tensor.reshape(-1), CAST_PIECE_ELEMENTS)


def check_indices(entry: Entry, lines: Sequence[Iterable[torch.Tensor]]) -> None:
    """Check the indices of a sparse tensor.

    Args:
        entry: The tensor.
        lines: The elements of each of ``index_lines`` in row-major order, in one-dimensional pieces of any size.

    Raises:
        FormatError: An index is outside the tensor, or indices are not in the order that the layout requires.
    """
    composite = entry.composite
    assert isinstance(composite, Sparse)
    cursors = [_Cursor(line) for line in lines]
    if composite.layout == "sparse_coo":
        _check_coo(entry.shape, composite, cursors)
    else:
        _check_compressed(entry.shape, composite, *cursors)


class _Cursor:
    """Reads any number of elements at a time from a sequence of pieces."""

    def __init__(self, pieces: Iterable[torch.Tensor]) -> None:
        self._pieces = iter(pieces)
        self._held = torch.empty(0, dtype=torch.int64, device="cpu")

    def take(self, count: int) -> torch.Tensor:
        """Return the next ``count`` elements as int64. The pieces must have that many."""
        found = []
        while count:
            if not self._held.numel():
                self._held = next(self._pieces)
            some, self._held = self._held[:count], self._held[count:]
            found.append(some.to(torch.int64))
            count -= some.numel()
        return found[0] if len(found) == 1 else torch.cat(found)


def _windows(count: int) -> Iterator[int]:
    """Yield the sizes of pieces that add up to ``count``."""
    for first in range(0, count, CAST_PIECE_ELEMENTS):
        yield min(CAST_PIECE_ELEMENTS, count - first)


def _check_coo(shape: Sequence[int], composite: Sparse, rows: Sequence[_Cursor]) -> None:
    count = composite.indices[0].shape[1]
    last: torch.Tensor | None = None
    for length in _windows(count):
        # Row-major positions, which are below 2**63: the index has checked that.
        position: torch.Tensor | None = None
        for dim, (row, size) in enumerate(zip(rows, shape, strict=False)):  # sparse dimensions come first
            piece = row.take(length)
            _check_range(piece, size, f"an index of dimension {dim} of a sparse tensor is out of range")
            position = piece if position is None else position * size + piece
        if not composite.coalesced:
            continue
        if position is None:
            position = torch.zeros(length, dtype=torch.int64, device="cpu")
        if last is not None:
            position = torch.cat([last, position])
        if not bool((position[1:] > position[:-1]).all()):
            raise FormatError("the indices of a coalesced sparse tensor are not sorted or not distinct")
        last = position[-1:]


def _check_range(piece: torch.Tensor, size: int, problem: str) -> None:
    low, high = piece.aminmax()
    if low < 0 or high >= size:
        raise FormatError(problem, expected=f"0 to {size - 1}", found=f"{int(low)} to {int(high)}")


def _check_compressed(shape: Sequence[int], composite: Sparse, compressed: _Cursor, plain: _Cursor) -> None:
    """Check compressed and plain indices; the lines of a batch are checked as one matrix."""
    per_line, count = composite.indices[0].shape[-1], composite.indices[1].shape[-1]
    size = _plain_size(shape, composite)
    last: torch.Tensor | None = None
    done = 0
    for length in _windows(composite.indices[0].numel):
        found = compressed.take(length)
        number = torch.arange(done, done + length, device=found.device)
        done += length
        ends = (number % per_line == 0) & (found != 0) | (number % per_line == per_line - 1) & (found != count)
        if bool(ends.any()):
            problem = "the compressed indices of a sparse tensor do not run from 0 to the number of its elements"
            raise FormatError(problem, expected=count)
        starts = found + number // per_line * count
        if last is not None:
            starts = torch.cat([last, starts])
        # Lines follow each other, so that any decrease is an error, as is a value outside its line.
        if not bool((starts[1:] >= starts[:-1]).all()) or bool(((found < 0) | (found > count)).any()):
            raise FormatError("the compressed indices of a sparse tensor are not sorted")
        _check_plain(plain, starts, size)
        last = starts[-1:]


def _plain_size(shape: Sequence[int], composite: Sparse) -> int:
    """Return the exclusive upper bound of the plain indices."""
    batch = len(composite.indices[0].shape) - 1
    other = batch + (composite.layout in {"sparse_csr", "sparse_bsr"})
    blocked = composite.layout in {"sparse_bsr", "sparse_bsc"}
    return shape[other] // (composite.values.shape[other + 1] if blocked else 1)


def _check_plain(plain: _Cursor, starts: torch.Tensor, size: int) -> None:
    """Check the plain indices between the first and last of ``starts``, the positions where rows begin."""
    first = int(starts[0])
    before: torch.Tensor | None = None
    for length in _windows(int(starts[-1]) - first):
        piece = plain.take(length)
        _check_range(piece, size, "a plain index of a sparse tensor is out of range")
        joined = piece if before is None else torch.cat([before, piece])
        (backward,) = torch.nonzero(joined[1:] <= joined[:-1], as_tuple=True)
        backward = backward + (first + 1 if before is None else first)
        if not bool(torch.isin(backward, starts).all()):
            raise FormatError("the plain indices of a sparse tensor are not sorted in a row or not distinct")
        before = piece[-1:]
        first += length
