"""Facts about storages, which do not keep the storages alive."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef

# Storages have no public identity.
# ruff: noqa: SLF001

__all__ = ["StorageTable"]

_Fact = TypeVar("_Fact")

#: Facts that are always kept, also about storages that are gone.
_FEWEST = 256


class StorageTable(Generic[_Fact]):
    """One fact for each storage, by its address. A weak reference keeps an address unique."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[StorageWeakRef, _Fact]] = {}
        self._most = _FEWEST

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, storage: torch.UntypedStorage, fact: _Fact) -> None:
        """Add a storage. Those that are gone are removed each time their number may have doubled."""
        if len(self._found) >= self._most:
            self._found = {at: known for at, known in self._found.items() if not known[0].expired()}  # type: ignore[no-untyped-call]
            self._most = _FEWEST + 2 * len(self._found)
        self._found[storage._cdata] = (StorageWeakRef(storage), fact)  # type: ignore[no-untyped-call]

    def get(self, storage: torch.UntypedStorage) -> _Fact | None:
        """Return the fact about a storage, or None."""
        known = self._found.get(storage._cdata)
        return None if known is None or known[0].expired() else known[1]  # type: ignore[no-untyped-call]
