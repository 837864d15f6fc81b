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
from torch.nn.parameter import is_lazy

# Storages have no public identity.
# ruff: noqa: SLF001

__all__ = ["describe_moves", "home_of", "moved_to", "remember_move"]


class _Moves:
    """Device of each moved storage, by the address of the storage."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self._most = 256

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, storage: torch.UntypedStorage, device: torch.device) -> None:
        """Add a storage. Expired ones are removed each time their number may have doubled."""
        if len(self._found) >= self._most:
            self._found = {at: move for at, move in self._found.items() if not move[0].expired()}  # type: ignore[no-untyped-call]
            self._most = 256 + 2 * len(self._found)
        self._found[storage._cdata] = (StorageWeakRef(storage), device)  # type: ignore[no-untyped-call]

    def get(self, storage: torch.UntypedStorage) -> torch.device | None:
        """Return the device of a storage, or None."""
        reference, device = self._found.get(storage._cdata, (None, None))
        return None if reference is None or reference.expired() else device  # type: ignore[no-untyped-call]


_moves = _Moves()


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
