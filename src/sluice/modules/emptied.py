"""Storages on meta that took the place of real ones, and the devices to which constructors moved them.

A storage on meta has the size of the real one, and a tensor the same place in both, so tensors that shared memory share
it on meta too. Facts about storages do not keep them alive; a copy of a module has storages of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parameter import is_lazy

# Storages have no public identity.
# ruff: noqa: SLF001

__all__ = ["EMPTIED", "EmptiedStorages", "describe_moves", "device_of", "home_of", "moved_to", "remember_move"]

_Fact = TypeVar("_Fact")

_CPU = torch.device("cpu")

#: Facts that are always kept, also about storages that are gone.
_FEWEST = 256


class _StorageTable(Generic[_Fact]):
    """One fact for each storage, by its address. A weak reference keeps an address unique."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, _Fact]] = {}
        self._most = _FEWEST

    def add(self, storage: StorageWeakRef, fact: _Fact) -> None:
        """Add a storage. Those that are gone are removed each time their number may have doubled."""
        if len(self._found) >= self._most:
            self._found = {at: known for at, known in self._found.items() if not known[0].expired()}  # type: ignore[no-untyped-call]
            self._most = _FEWEST + 2 * len(self._found)
        self._found[storage.cdata] = (storage, fact)

    def get(self, tensor: torch.Tensor) -> _Fact | None:
        """Return the fact about a tensor's storage, or None."""
        known = self._found.get(_address(tensor)) if self._found else None
        return None if known is None or known[0].expired() else known[1]  # type: ignore[no-untyped-call]


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's storage; 0 if it has none, as lazy parameters and tensors inside torch.func."""
    try:
        return 0 if is_lazy(tensor) else tensor.untyped_storage()._cdata
    except NotImplementedError:
        return 0


#: Devices to which constructors moved storages on meta.
_moves: _StorageTable[torch.device] = _StorageTable()

#: Real storages that something still used after ``empty_init``.
EMPTIED: _StorageTable[bool] = _StorageTable()


class EmptiedStorages:
    """The storages that became empty in one context."""

    def __init__(self) -> None:
        #: The real storage, which this does not keep alive, and the one on meta, by the address of the real one.
        self._of: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
        self._original: dict[int, StorageWeakRef] = {}
        self._stale: set[int] = set()

    def stand_in(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on meta in place of one with memory."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._of:
            empty = torch.UntypedStorage(storage.nbytes(), device="meta")  # type: ignore[no-untyped-call]
            original = self._original[empty._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._of[storage._cdata] = original, empty
        stand_in = torch.empty(0, dtype=tensor.dtype, device="meta")
        stand_in.set_(self._of[storage._cdata][1], tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.device != _CPU:
            remember_move(stand_in, tensor.device)
        return stand_in

    def forget(self, storage: torch.UntypedStorage) -> None:
        """Forget a real storage that no tensor uses any more: the next one in it is another tensor."""
        _, empty = self._of.pop(storage._cdata, (None, None))
        if empty is not None:
            del self._original[empty._cdata]
            self._stale.discard(storage._cdata)

    def note_change(self, tensor: torch.Tensor) -> None:
        """Note that a change of the values of a tensor on meta was skipped."""
        original = self._original.get(_address(tensor))
        if original is not None and not original.expired():  # type: ignore[no-untyped-call]
            self._stale.add(original.cdata)

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor with memory would have other values if no change had been skipped."""
        return bool(self._stale) and not tensor.is_meta and _address(tensor) in self._stale

    def remember(self) -> None:
        """Remember the real storages that are still in use; nearly all are gone."""
        for original, _ in self._of.values():
            if not original.expired():  # type: ignore[no-untyped-call]
                EMPTIED.add(original, fact=True)


def remember_move(tensor: torch.Tensor, device: torch.device) -> None:
    """Remember the device of a tensor on meta."""
    if _address(tensor):
        _moves.add(StorageWeakRef(tensor.untyped_storage()), device)  # type: ignore[no-untyped-call]


def moved_to(tensor: torch.Tensor) -> torch.device | None:
    """Return the device to which the constructor of a module moved a tensor on meta, or None."""
    return _moves.get(tensor) if tensor.is_meta else None


def device_of(tensor: torch.Tensor) -> torch.device:
    """Return the device that a tensor would have in ordinary construction."""
    return (moved_to(tensor) or _CPU) if tensor.is_meta else tensor.device


def home_of(tensor: torch.Tensor) -> str:
    """Return where a tensor on meta gets its memory: where the constructor moved it, if torch can use that device."""
    device = moved_to(tensor)
    return str(device) if device is not None and _is_available(device) else "cpu"


def describe_moves(tensors: Iterable[torch.Tensor]) -> Iterator[str]:
    """Yield a note for each device to which the constructor moved some of the tensors."""
    devices = Counter(filter(None, map(moved_to, tensors)))
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
