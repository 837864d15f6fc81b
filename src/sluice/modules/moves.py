"""Devices to which constructors moved tensors that have no memory.

The device is kept by storage, so that every tensor object over it has it. A weak reference does not keep the storage
alive; a copy of the module made after its construction has storages of its own, which are not in the table.
"""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef

__all__ = ["moved_to", "remember_move"]

#: Weak reference and device by address of the storage.
_moves: dict[int, tuple[StorageWeakRef, torch.device]] = {}


def remember_move(storage: torch.UntypedStorage, device: torch.device) -> None:
    """Remember the device of a storage on meta."""
    for address in [address for address, (reference, _) in _moves.items() if reference.expired()]:
        del _moves[address]
    _moves[storage._cdata] = (StorageWeakRef(storage), device)


def moved_to(tensor: torch.Tensor) -> torch.device | None:
    """Return the device to which the constructor of a module moved a tensor on meta, or None."""
    if not _moves or not tensor.is_meta:
        return None
    reference, device = _moves.get(tensor.untyped_storage()._cdata, (None, None))
    return None if reference is None or reference.expired() else device
