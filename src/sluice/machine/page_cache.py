"""Probes of the page cache: the cached parts of a file, found without waiting for the disk.

Linux 6.5 and later count the cached pages of a range (``cachestat``). Newer versions do so only for processes that may
write to the file, and overlay file systems count nothing. In these cases single bytes are read without waiting
(``RWF_NOWAIT``). Such a probe fails if its page is not cached, but the kernel starts to read that page nevertheless;
so its offset is random, and the next load does not probe the same page. Overlay file systems, which hold the files of
containers, refuse that as well; but a mapping there is one of the file below, so ``mincore`` answers. To processes that
neither own the file nor may write to it, it reports every page as cached, so these do not ask.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
from collections.abc import Callable

from sluice import _options as options
from sluice.sources.mapping import map_privately

__all__ = ["probe_cache"]

#: System call number on every Linux architecture except Alpha.
_CACHESTAT = 451

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _CachestatCounts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def probe_cache(descriptor: int, offsets: range) -> tuple[bool, ...]:
    """Return for each part of a file whether it is cached, from one probe in it.

    Args:
        descriptor: The open file.
        offsets: First byte of each part; ``offsets.stop`` is the size of the file.

    Returns:
        One flag per part; empty if the kernel does not support probing.
    """
    if not offsets:
        return ()
    if _counts_pages(descriptor):
        return _probe_ranges(_cached_bytes, descriptor, offsets)
    found = _probe_bytes(descriptor, offsets)
    if found or not _may_ask_mincore(descriptor):
        return found
    try:
        return _probe_ranges(_mapped_bytes, descriptor, offsets)
    except OSError:  # no mapping, or no mincore
        return ()


def _probe_ranges(cached_bytes: Callable[[int, int, int], int], descriptor: int, offsets: range) -> tuple[bool, ...]:
    found = []
    for offset in offsets:
        nbytes = min(options.PROBE_BYTES, offsets.step, offsets.stop - offset)
        # Half of it, as reading a header caches some neighbouring pages.
        found.append(2 * cached_bytes(descriptor, offset, nbytes) >= nbytes)
    return tuple(found)


def _counts_pages(descriptor: int) -> bool:
    """Return whether the kernel counts a page that was just read and so is certainly cached."""
    try:
        os.pread(descriptor, 1, 0)
    except OSError:  # a failing disk fails again when the plan reads
        return False
    return _cached_bytes(descriptor, 0, 1) > 0


def _cached_bytes(descriptor: int, offset: int, nbytes: int) -> int:
    """Return the bytes of the cached pages of a range; 0 if the kernel does not count them."""
    if _libc is None:
        return 0
    place, pages = _CachestatRange(offset, nbytes), _CachestatCounts()
    refused = _libc.syscall(ctypes.c_long(_CACHESTAT), descriptor, ctypes.byref(place), ctypes.byref(pages), 0)
    return 0 if refused else int(pages.cached) * mmap.PAGESIZE


def _may_ask_mincore(descriptor: int) -> bool:
    """Return whether ``mincore`` tells this process the truth about a file."""
    if _libc is None:
        return False
    if os.geteuid() in (0, os.fstat(descriptor).st_uid):
        return True
    return os.access(f"/proc/self/fd/{descriptor}", os.W_OK, effective_ids=True)


def _mapped_bytes(descriptor: int, offset: int, nbytes: int) -> int:
    """Return the bytes of the cached pages of a range that starts at a page, by mapping it without touching it.

    Raises:
        OSError: The system cannot map the file, or has no ``mincore``.
    """
    assert _libc is not None
    mapping, lead = map_privately(descriptor, offset, nbytes)
    pages = (ctypes.c_ubyte * -(-(lead + nbytes) // mmap.PAGESIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    if _libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(lead + nbytes), pages):
        raise OSError(errno.ENOSYS, "mincore failed")
    return sum(page & 1 for page in pages[lead // mmap.PAGESIZE :]) * mmap.PAGESIZE


def _probe_bytes(descriptor: int, offsets: range) -> tuple[bool, ...]:
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return ()
    found = []
    one = bytearray(1)
    for offset in offsets:
        anywhere = offset + int.from_bytes(os.urandom(8)) % min(offsets.step, offsets.stop - offset)
        try:
            found.append(os.preadv(descriptor, [one], anywhere, nowait) == 1)
        except BlockingIOError:
            found.append(False)
        except OSError:  # unsupported here; a failing disk fails again when the plan reads
            return ()
    return tuple(found)
