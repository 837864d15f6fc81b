"""The choice between huge pages and 4 KiB pages for memory that is about to be filled.

The kernel zeroes huge pages at several GB/s. But a virtual machine may return free memory to its host, in blocks of
2 MiB. The first touch of a huge page that the host has taken takes twenty times as long, and five times as long as
those of 512 small pages. Both kinds of memory lie side by side, and nothing says which is which. So each huge page is
touched before bytes arrive in it. After a slow touch the rest of the range gets small pages, and so do the next ranges:
8 MiB after the first slow touch, twice as much after each further one in a row, up to ``MOST_UNTOUCHED_PAGES``.
"""

from __future__ import annotations

import time

from msgspec import Struct

from sluice import _defaults as defaults
from sluice.engine.host_memory import HostMemory

__all__ = ["PageSizes"]

#: Huge pages of one read.
_FIRST_PAUSE = defaults.READ_BYTES // defaults.HUGE_PAGE_BYTES


class PageSizes(Struct):
    """Chooses the pages of the memory of one load. Threads may call it; they can at most touch a page too many."""

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
        small = pages if self._skips(len(pages)) else self._touch(memory, pages)
        if small:
            memory.use_small_pages(small)

    def _skips(self, count: int) -> bool:
        if self._untouched <= 0:
            return False
        self._untouched -= count
        return True

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
