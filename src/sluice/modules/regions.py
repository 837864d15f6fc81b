"""Where tensors are in their storages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from msgspec import Struct

from sluice.records.geometry import is_dense

__all__ = ["Region", "region_of"]


class Region(Struct, frozen=True, kw_only=True):
    """Where a strided tensor is in a storage; offset and strides count elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    #: Whether reading it conjugates or negates the elements.
    lazy_operator: bool

    @property
    def is_dense(self) -> bool:
        """Whether it has every element between its first and its last, each once."""
        return is_dense(self.shape, self.stride)

    @property
    def span(self) -> tuple[int, int]:
        """The first byte, and the one after the last."""
        last = sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return self.offset * self.dtype.itemsize, (self.offset + last + 1) * self.dtype.itemsize

    def overlaps(self, other: Region) -> bool:
        """Return whether two places have an element in common, or may have one.

        Slices of one tensor are told apart exactly, such as its columns; other ways to interleave are not.
        """
        (start, stop), (first, last) = self.span, other.span
        if stop <= first or last <= start:
            return False
        steps = sorted({step for region in (self, other) for step in region.sizes}, reverse=True)
        if self.dtype != other.dtype or any(large % small for large, small in pairwise(steps)):
            return True
        mine, theirs = self.digits(steps), other.digits(steps)
        return (
            mine is None or theirs is None or all(a < d and c < b for (a, b), (c, d) in zip(mine, theirs, strict=True))
        )

    @property
    def sizes(self) -> dict[int, int]:
        """Size by stride, of the dimensions that move."""
        return {step: size for size, step in zip(self.shape, self.stride, strict=True) if size > 1 and step}

    def digits(self, steps: Sequence[int]) -> list[tuple[int, int]] | None:
        """Return the range of the index at each step, and of what remains; None if an index runs into the next one."""
        sizes, rest, digits = self.sizes, self.offset, []
        for number, step in enumerate(steps):
            first, rest = divmod(rest, step)
            digits.append((first, first + sizes.get(step, 1)))
            if number and digits[-1][1] > steps[number - 1] // step:
                return None
        moving = sum(1 for size, step in zip(self.shape, self.stride, strict=True) if size > 1 and step)
        return [*digits, (rest, rest + 1)] if moving == len(sizes) else None


def region_of(tensor: torch.Tensor) -> Region:
    """Return where a tensor is in its storage."""
    return Region(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        lazy_operator=tensor.is_conj() or tensor.is_neg(),
    )
