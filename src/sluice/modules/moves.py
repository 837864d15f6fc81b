"""Devices to which constructors moved tensors that have no memory.

The device is kept by storage, so that every tensor object over it has it. A weak reference does not keep the storage
alive; a copy of the module made after its construction has storages of its own, which are not in the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch.nn.parameter import is_lazy

from sluice.modules.storage_table import StorageTable

__all__ = ["describe_moves", "home_of", "moved_to", "remember_move"]


_moves: StorageTable[torch.device] = StorageTable()


def remember_move(storage: torch.UntypedStorage, device: torch.device) -> None:
    """Remember the device of a storage on meta."""
    _moves.add(storage, device)


def moved_to(tensor: torch.Tensor) -> torch.device | None:
    """Return the device to which the constructor of a module moved a tensor on meta, or None."""
    if not _moves or not tensor.is_meta or is_lazy(tensor):  # a lazy parameter has no storage
        return None
    return _moves.get(tensor.untyped_storage())


def home_of(tensor: torch.Tensor) -> str:
    """Return where a tensor on meta gets its memory: where the constructor moved it, if torch can use that device."""
    device = moved_to(tensor)
    return str(device) if device is not None and _is_available(device) else "cpu"


def describe_moves(tensors: Iterable[torch.Tensor]) -> Iterator[str]:
    """Yield a note for each device to which the constructor moved some of the tensors."""
    devices = Counter(device for device in map(moved_to, tensors) if device is not None)
    for device, count in devices.items():
        what = f"the constructor moved {count} {'tensor' if count == 1 else 'tensors'} to {device}"
        yield what if _is_available(device) else f"{what}, which is not available: placed on the CPU"


@cache
def _is_available(device: torch.device) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # torch without CUDA raises AssertionError
        return False
    return True
