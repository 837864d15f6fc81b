"""Where tensors are in their storages."""

from __future__ import annotations

import torch
from msgspec import Struct

from sluice._geometry import is_dense

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


def region_of(tensor: torch.Tensor) -> Region:
    """Return where a tensor is in its storage."""
    return Region(
        dtype=tensor.dtype,
        shape=tuple(tensor.shape),
        stride=tensor.stride(),
        offset=int(tensor.storage_offset()),
        lazy_operator=tensor.is_conj() or tensor.is_neg(),
    )
