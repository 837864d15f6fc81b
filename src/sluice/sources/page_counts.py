"""Counts of the cached pages of a file, by ``cachestat`` or ``mincore``.

Linux 6.5 and later count the cached pages of a range (``cachestat``). Overlay file systems report none, because the
pages belong to the file below. ``mincore`` looks at a mapping, which is one of that file; it is also older. Both refuse
processes that neither own the file nor may write to it; ``mincore`` does so by calling all pages cached.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from functools import cache

from sluice.sources.mapping import map_privately

__all__ = ["cached_bytes", "resident_bytes"]

#: System call number on every Linux architecture except Alpha.
_CACHESTAT = 451


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _CachestatCounts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


@cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if sys.platform == "linux" else None


def cached_bytes(descriptor: int, offset: int, nbytes: int) -> int:
    """Return the bytes of the cached pages of a range by ``cachestat``; 0 if the kernel does not count them."""
    libc = _libc()
    if libc is None:
        return 0
    place, pages = _CachestatRange(offset, nbytes), _CachestatCounts()
    refused = libc.syscall(ctypes.c_long(_CACHESTAT), descriptor, ctypes.byref(place), ctypes.byref(pages), 0)
    return 0 if refused else int(pages.cached) * mmap.PAGESIZE


def resident_bytes(descriptor: int, offset: int, nbytes: int) -> int:
    """Return the bytes of the cached pages of a range by ``mincore``; 0 if it is refused.

    The range is mapped for the moment; no page of it is touched.

    Args:
        descriptor: The open file.
        offset: First byte.
        nbytes: Bytes of the range.
    """
    libc = _libc()
    if libc is None or not _may_ask(descriptor):
        return 0
    lead = offset % mmap.PAGESIZE
    try:
        mapping, _ = map_privately(descriptor, offset - lead, lead + nbytes)
    except (OSError, ValueError):  # the file system has no mappings
        return 0
    pages = ctypes.create_string_buffer(-(-(lead + nbytes) // mmap.PAGESIZE))
    first = ctypes.c_ubyte.from_buffer(mapping)
    address = ctypes.c_void_p(ctypes.addressof(first))
    refused = libc.mincore(address, ctypes.c_size_t(lead + nbytes), pages)
    return 0 if refused else pages.raw.count(1) * mmap.PAGESIZE


def _may_ask(descriptor: int) -> bool:
    """Return whether ``mincore`` tells this process the truth about a file."""
    if os.geteuid() in {0, os.fstat(descriptor).st_uid}:
        return True
    return os.access(f"/proc/self/fd/{descriptor}", os.W_OK, effective_ids=True)
