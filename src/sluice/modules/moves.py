"""Devices to which constructors moved tensors that have no memory.

The device is kept by storage, so that every tensor object over it has it. A weak reference does not keep the storage
alive; a copy of the module made after its construction has storages of its own, which are not in the table.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# Storages have no public identity.
# ruff: noqa: SLF001

__all__ = ["describe_moves", "home_of", "moved_to", "remember_move"]

#: Weak reference and device by address of the storage.
_moves: dict[int, tuple[StorageWeakRef, torch.device]] = {}


def remember_move(storage: torch.UntypedStorage, device: torch.device) -> None:
    """Remember the device of a storage on meta."""
    expired = [address for address, (reference, _) in _moves.items() if reference.expired()]  # type: ignore[no-untyped-call]
    for address in expired:
        del _moves[address]
    _moves[storage._cdata] = (StorageWeakRef(storage), device)  # type: ignore[no-untyped-call]


def moved_to(tensor: torch.Tensor) -> torch.device | None:
    """Return the device to which the constructor of a module moved a tensor on meta, or None."""
    if not _moves or not tensor.is_meta:
        return None
    reference, device = _moves.get(tensor.untyped_storage()._cdata, (None, None))
    return None if reference is None or reference.expired() else device  # type: ignore[no-untyped-call]


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
