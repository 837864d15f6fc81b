"""Tensors on meta that took the place of real ones, and the memory of the real ones.

Under ``empty_init`` a parameter or persistent buffer that was computed gets a tensor on meta. Other tensors, such as an
attribute of the module, may share memory with the real one. ``original_of`` remembers where in this memory the tensor
was as long as it matters, so that ``followers`` can find those others when the module is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from msgspec import Struct
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

from sluice.modules.histories import Histories
from sluice.modules.regions import Region, region_of
from sluice.modules.storage_table import StorageTable

# Storages have no public identity.
# ruff: noqa: SLF001

__all__ = ["Emptied", "original_of"]


class _Original(Struct, frozen=True):
    """The memory of a real tensor that one on meta replaced."""

    #: The storage; keeping the reference keeps its address unique.
    storage: StorageWeakRef
    region: Region


class _Replaced(Struct):
    """The tensors on meta that replaced tensors over one storage, by their place in it."""

    storage: StorageWeakRef
    tensors: dict[Region, torch.Tensor]


_originals: StorageTable[_Original] = StorageTable()


class Emptied:
    """The tensors that became empty in one context."""

    def __init__(self, histories: Histories) -> None:
        self._histories = histories
        self._of: dict[int, _Replaced] = {}

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return an empty tensor in place of one with memory: over the same storage for tensors that are the same."""
        tensors, region = self._over(tensor.untyped_storage()), region_of(tensor)
        if region not in tensors:
            empty = torch.empty_like(tensor, device="meta", requires_grad=False)
            self._histories.start(empty, self._histories.keep(tensor), tensor.device, empty=True)
            tensors[region] = empty
        return tensors[region].detach()

    def share(self, storage: torch.UntypedStorage, buffers: Mapping[Region, torch.Tensor]) -> None:
        """Note empty buffers that were registered in place of tensors over a storage."""
        self._over(storage).update(buffers)

    def _over(self, storage: torch.UntypedStorage) -> dict[Region, torch.Tensor]:
        replaced = self._of.get(storage._cdata)
        if replaced is None or replaced.storage.expired():  # type: ignore[no-untyped-call]
            reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            replaced = self._of[storage._cdata] = _Replaced(reference, {})
        return replaced.tensors

    def remember(self) -> None:
        """Remember the memory of the tensors that share it with others; nearly all have their own."""
        for replaced in self._of.values():
            if len(replaced.tensors) > 1 or not replaced.storage.expired():  # type: ignore[no-untyped-call]
                for region, tensor in replaced.tensors.items():
                    _originals.add(tensor.untyped_storage(), _Original(replaced.storage, region))


def original_of(tensor: torch.Tensor) -> tuple[int, Region] | None:
    """Return the address of the storage, and the place in it, of the real tensor that an empty one replaced."""
    if not _originals or not tensor.is_meta or is_lazy(tensor):  # a lazy parameter has no storage
        return None
    original = _originals.get(tensor.untyped_storage())
    return None if original is None else (original.storage.cdata, original.region)
