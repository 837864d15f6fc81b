"""Host memory that is used again: weights that pass through memory one after the other need no new pages.

The first touch of a page takes several times as long as the copy of its bytes, and on some virtual machines as long as
the read from the disk. Memory that a tensor of the caller still views is not used again.
"""

from __future__ import annotations

import sys
import threading
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
        #: Unused memory in the order of its return.
        self._unused: list[HostMemory] = []
        self._lent_bytes = 0

    @property
    def mapped_bytes(self) -> int:
        """Bytes that are lent or unused."""
        return self._lent_bytes + sum(memory.nbytes for memory in self._unused)

    def take(self, nbytes: int) -> HostMemory:
        """Return memory of at least ``nbytes`` bytes, with any content."""
        size = round_up(nbytes, defaults.RECYCLED_STEP_BYTES)
        with self._lock:
            memory = next((each for each in self._unused if each.nbytes == size), None)
            if memory is not None:
                self._unused.remove(memory)
            else:
                while self._unused and self.mapped_bytes + size > self._most_bytes:
                    del self._unused[0]
                memory = HostMemory(size, huge_pages=self._huge_pages)
            self._lent_bytes += size
        return memory

    def give_back(self, memories: Iterable[HostMemory]) -> None:
        """Take memory back, or leave it to the tensors of the caller that still view it."""
        with self._lock:
            for memory in memories:
                self._lent_bytes -= memory.nbytes
                if _references(memory) == _UNUSED:
                    self._unused.append(memory)

    def clear(self) -> None:
        """Free the unused memory."""
        with self._lock:
            self._unused.clear()


def _references(memory: HostMemory) -> int:
    """Return the number of references to a mapping; each storage that views it holds one."""
    return sys.getrefcount(memory.mapping)


#: References to a mapping that no tensor views.
_UNUSED = _references(HostMemory(1, huge_pages=False))
