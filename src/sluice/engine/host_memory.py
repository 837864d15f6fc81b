"""Anonymous host memory on huge pages, for targets and staging buffers.

The first touch of 4 KiB pages takes several times as long as the copy that causes it; 2 MiB pages make it cheap. They
need an address that is a multiple of 2 MiB and ``madvise``. They must not cover a partial tail, because the rest of the
last huge page would count as resident. ``PageSizes`` chooses between them while memory is filled.

``RecycledMemory`` is used again, so that weights that pass through memory one after the other need no new pages: the
first touch of one takes on some virtual machines as long as the read from the disk.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress

from msgspec import Struct

from sluice import _defaults as defaults
from sluice._errors import BudgetError
from sluice.records.geometry import round_down, round_up

__all__ = ["HostMemory", "PageSizes", "RecycledMemory"]

#: Number of the advice, which ``mmap`` does not name.
_MADV_POPULATE_WRITE = 23

#: Huge pages of one read.
_FIRST_PAUSE = defaults.READ_BYTES // defaults.HUGE_PAGE_BYTES

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class HostMemory:
    """Zeroed private memory, freed when the last object that views it is deleted.

    Attributes:
        mapping: The mapping, for ``torch.frombuffer``.
        start: First usable byte in ``mapping``; its address is a multiple of 4 KiB, and of 2 MiB with huge pages.
        nbytes: Usable bytes from ``start``.
    """

    __slots__ = ("_address", "_unchosen", "mapping", "nbytes", "start")

    def __init__(self, nbytes: int, *, huge_pages: bool) -> None:
        """Map at least ``nbytes``; only pages that are touched become resident.

        Raises:
            BudgetError: The operating system refused the mapping.
        """
        self._address: int | None = None
        #: For each huge page 1, or 0 once it was chosen. Changed by single calls, so that threads need no lock.
        self._unchosen = bytearray()
        self.nbytes = round_up(nbytes, mmap.PAGESIZE)
        huge = huge_pages and self.nbytes >= defaults.HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
        if not huge:
            self.mapping = _map(self.nbytes)
            self.start = 0
            return
        # Linux 6.7 and later align a mapping whose length is a multiple of 2 MiB; older kernels need a margin.
        self.mapping = _map(round_up(self.nbytes, defaults.HUGE_PAGE_BYTES))
        self.start = -_address(self.mapping) % defaults.HUGE_PAGE_BYTES
        if self.start:
            del self.mapping  # first, because a limit on virtual memory would count both
            self.mapping = _map(self.nbytes + defaults.HUGE_PAGE_BYTES)
            self.start = -_address(self.mapping) % defaults.HUGE_PAGE_BYTES
        whole = round_down(self.nbytes, defaults.HUGE_PAGE_BYTES)
        self._unchosen.extend(b"\1" * (whole // defaults.HUGE_PAGE_BYTES))
        self.mapping.madvise(mmap.MADV_HUGEPAGE, self.start, whole)
        if whole < self.nbytes:
            self.mapping.madvise(mmap.MADV_NOHUGEPAGE, self.start + whole, self.nbytes - whole)

    @property
    def address(self) -> int:
        """Address of the first usable byte."""
        if self._address is None:
            self._address = _address(self.mapping) + self.start
        return self._address

    def populate(self) -> None:
        """Make all of it resident by one call, which takes less time than a fault for each page (Linux 5.14)."""
        with suppress(OSError):  # older kernels
            self.mapping.madvise(_MADV_POPULATE_WRITE)

    def unchosen_pages(self, start: int, nbytes: int) -> range:
        """Return the huge pages of a range, from the first that no call has returned; the next call returns others.

        Args:
            start: First byte of the range, from ``start`` of this memory.
            nbytes: Bytes of the range.
        """
        end = min(-(-(start + nbytes) // defaults.HUGE_PAGE_BYTES), len(self._unchosen))
        first = self._unchosen.find(1, start // defaults.HUGE_PAGE_BYTES, end)
        if first < 0:
            return range(0)
        self._unchosen[first:end] = bytes(end - first)
        return range(first, end)

    def populate_page(self, page: int) -> None:
        """Make a huge page resident and keep its bytes; nothing happens on Linux before 5.14."""
        if _libc is not None:  # mmap.madvise would stop the other threads meanwhile
            address = self.address + page * defaults.HUGE_PAGE_BYTES
            _libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), _MADV_POPULATE_WRITE)

    def use_small_pages(self, pages: range) -> None:
        """Use 4 KiB pages in place of huge pages that are not resident."""
        start, nbytes = pages.start * defaults.HUGE_PAGE_BYTES, len(pages) * defaults.HUGE_PAGE_BYTES
        self.mapping.madvise(mmap.MADV_NOHUGEPAGE, self.start + start, nbytes)

    def view(self) -> memoryview:
        """Return the usable bytes."""
        return memoryview(self.mapping)[self.start : self.start + self.nbytes]


class PageSizes(Struct):
    """The choice between huge pages and 4 KiB pages for memory that is about to be filled, of one load.

    The kernel zeroes huge pages at several GB/s. But a virtual machine may return free memory to its host, in blocks of
    2 MiB. The first touch of a huge page that the host has taken takes twenty times as long, and five times as long as
    those of 512 small pages. Both kinds of memory lie side by side, and nothing says which is which. So each huge page
    is touched before bytes arrive in it. After a slow touch the rest of the range gets small pages, and so do the next
    ranges: 8 MiB after the first slow touch, twice as much after each further one in a row, up to
    ``MOST_UNTOUCHED_PAGES``. Threads may call it; they can at most touch a page too many.
    """

    #: Huge pages in whose place small ones are used without a touch.
    _untouched: int = 0
    #: Their number after the next slow touch.
    _pause: int = _FIRST_PAUSE

    def choose(self, memory: HostMemory, start: int, nbytes: int) -> None:
        """Choose the pages of a range that is about to be filled, and make its huge pages resident.

        Args:
            memory: The memory; nothing happens if it has no huge pages.
            start: First byte of the range, from ``memory.start``.
            nbytes: Bytes of the range.
        """
        pages = memory.unchosen_pages(start, nbytes)
        if not pages:
            return
        if self._untouched > 0:
            self._untouched -= len(pages)
        else:
            pages = self._touch(memory, pages)
        if pages:
            memory.use_small_pages(pages)

    def _touch(self, memory: HostMemory, pages: range) -> range:
        """Touch pages until one is slow; return the others."""
        for number, page in enumerate(pages):
            began = time.thread_time()  # of this thread: it may have to wait for a processor
            memory.populate_page(page)
            if time.thread_time() - began >= defaults.SLOW_HUGE_PAGE_SECONDS:
                self._untouched = self._pause
                self._pause = min(2 * self._pause, defaults.MOST_UNTOUCHED_PAGES)
                return pages[number + 1 :]
        self._pause = max(self._pause // 2, _FIRST_PAUSE)
        return range(0)


def _map(nbytes: int) -> mmap.mmap:
    try:
        if hasattr(mmap, "MAP_PRIVATE"):
            return mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        return mmap.mmap(-1, nbytes)
    except OSError as error:
        problem = f"the operating system refused memory (a limit of the process, as of ulimit -v?): {error}"
        raise BudgetError(problem, found=f"{nbytes} bytes") from error


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


class RecycledMemory:
    """A bounded number of bytes of host memory, lent and taken back, unless a tensor views it. Safe for threads."""

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
