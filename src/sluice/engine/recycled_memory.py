"""Host memory that is used again: weights that pass through memory one after the other need no new pages.

The first touch of a page takes several times as long as the copy of its bytes, and on some virtual machines as long as
the read from the disk. Memory that a tensor of the caller still views is not used again.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable

from sluice import _defaults as defaults
from sluice.engine.host_memory import HostMemory
from sluice.records.geometry import round_up

__all__ = ["RecycledMemory"]


class RecycledMemory:
    """A bounded number of bytes of host memory, lent and taken back. Safe for threads."""

    def __init__(self, most_bytes: int, *, huge_pages: bool) -> None:
        """Map nothing yet.

        Args:
            most_bytes: Memory that is not in use is freed before more than this is mapped.
            huge_pages: Whether to map huge pages.
        """
        self._most_bytes, self._huge_pages = most_bytes, huge_pages
        self._lock = threading.Lock()
        #: Unused memory by size; the size that was returned last is the last.
        self._unused: OrderedDict[int, list[HostMemory]] = OrderedDict()
        self._lent_bytes = 0
        self._unused_bytes = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are lent or unused."""
        return self._lent_bytes + self._unused_bytes

    def take(self, nbytes: int) -> HostMemory:
        """Return memory of at least ``nbytes`` bytes, with any content."""
        size = round_up(nbytes, defaults.RECYCLED_STEP_BYTES)
        with self._lock:
            same = self._unused.get(size)
            if same:
                self._unused_bytes -= size
                memory = same.pop()
            else:
                self._free(self.mapped_bytes + size - self._most_bytes)
                memory = HostMemory(size, huge_pages=self._huge_pages)
            self._lent_bytes += size
        return memory

    def give_back(self, memories: Iterable[HostMemory]) -> None:
        """Take memory back, or leave it to the tensors of the caller that still view it."""
        with self._lock:
            for memory in memories:
                size = memory.nbytes
                self._lent_bytes -= size
                if _references(memory) == _UNUSED:
                    self._unused.setdefault(size, []).append(memory)
                    self._unused.move_to_end(size)
                    self._unused_bytes += size

    def clear(self) -> None:
        """Free the unused memory."""
        with self._lock:
            self._free(self._unused_bytes)

    def _free(self, nbytes: int) -> None:
        """Free at least ``nbytes`` bytes of unused memory if there are as many, those returned first."""
        while nbytes > 0 and self._unused:
            size, memories = next(iter(self._unused.items()))
            while memories and nbytes > 0:
                memories.pop()
                self._unused_bytes -= size
                nbytes -= size
            if not memories:
                del self._unused[size]


def _references(memory: HostMemory) -> int:
    """Return the number of references to a mapping; each storage that views it holds one."""
    return sys.getrefcount(memory.mapping)


#: References to a mapping that no tensor views.
_UNUSED = _references(HostMemory(1, huge_pages=False))
