"""Tensors of a module that share memory with a tensor on meta, and have its values after a load.

A constructor may keep a tensor, or a part of it, as an attribute or non-persistent buffer, and make a parameter of the
same memory. In ordinary torch a load changes both. Here the parameter gets new memory, and each ``Follower`` becomes
the same view of the new memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from msgspec import Struct

from sluice.modules.emptied import original_of
from sluice.modules.regions import Region, region_of
from sluice.modules.swap import is_plain

# Storages have no public identity.
# ruff: noqa: SLF001

__all__ = ["Follower", "SharedMemory", "place_in_memory"]


class Follower(Struct, frozen=True, kw_only=True):
    """A tensor that views the memory of a slot, or a part of it."""

    tensor: torch.Tensor
    #: Whether it is all of the slot's tensor, in the same shape.
    is_whole: bool
    #: Shape, and strides in elements.
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    #: Elements from the first of the slot's tensor.
    offset: int
    #: Strides of the slot's tensor for which ``stride`` and ``offset`` are right.
    slot_stride: tuple[int, ...]

    def view_of(self, loaded: torch.Tensor) -> torch.Tensor:
        """Return the view of the slot's new memory."""
        view = loaded.detach()
        if self.is_whole:
            return view
        assert _same_steps(loaded.shape, loaded.stride(), self.slot_stride)  # dense tensors keep their layout
        return view.as_strided(self.shape, self.stride, view.storage_offset() + self.offset)


def place_in_memory(tensor: torch.Tensor) -> tuple[int, Region]:
    """Return the address of a tensor's storage and its place there: of the real memory that an empty one replaced."""
    return original_of(tensor) or (tensor.untyped_storage()._cdata, region_of(tensor))


class SharedMemory:
    """The memory of the slots on meta."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        #: Whether a tensor with memory can share that of a slot.
        self.has_real = any(original_of(tensor) is not None for tensor in tensors)

    @cached_property
    def _regions(self) -> dict[int, list[tuple[int, Region]]]:
        regions: dict[int, list[tuple[int, Region]]] = {}
        for slot, tensor in enumerate(self._tensors):
            if not tensor.is_meta or not is_plain(tensor) or not tensor.numel():
                continue
            places = {tensor.untyped_storage()._cdata: region_of(tensor)}
            places.update([place_in_memory(tensor)])
            for storage, region in places.items():
                regions.setdefault(storage, []).append((slot, region))
        return regions

    def shared_with(self, tensor: torch.Tensor) -> Iterator[tuple[int, Follower | None]]:
        """Yield each slot with which a tensor shares memory, and how it follows the slot; None if it cannot."""
        if not (tensor.is_meta or self.has_real) or not is_plain(tensor) or not tensor.numel():
            return
        regions = self._regions.get(tensor.untyped_storage()._cdata)
        if regions is None:
            return
        own = region_of(tensor)
        for slot, region in regions:
            if own.overlaps(region):
                yield slot, _follower(tensor, own, region)


def _follower(tensor: torch.Tensor, own: Region, slot: Region) -> Follower | None:
    """Return how a tensor follows a slot whose memory overlaps its own; None if a view cannot express it."""
    (start, stop), (first, last) = own.span, slot.span
    inside = first <= start and stop <= last and (slot.is_dense or own == slot)
    if not inside or own.dtype != slot.dtype or own.lazy_operator or slot.lazy_operator or tensor.grad_fn is not None:
        return None
    return Follower(
        tensor=tensor,
        is_whole=own == slot,
        shape=own.shape,
        stride=own.stride,
        offset=own.offset - slot.offset,
        slot_stride=slot.stride,
    )


def _same_steps(shape: Sequence[int], stride: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two strides mean the same elements; those of dimensions of one element are never used."""
    return all(size == 1 or step == another for size, step, another in zip(shape, stride, other, strict=True))
