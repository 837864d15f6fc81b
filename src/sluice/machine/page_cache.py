"""Which parts of a file are in the page cache, asked without waiting for the disk.

Linux 6.5 and later count the cached pages of a range (``cachestat``), in newer versions only to those who may write to
the file, and on stacked file systems wrongly. Where that is so, single bytes are asked for (``RWF_NOWAIT``). Such a
probe is refused where its page is not cached, but the kernel begins to read that page nevertheless: it is taken
anywhere in its range, so that the next load does not look where this one did.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import sys

from sluice import _options as options

__all__ = ["probe_cache"]

#: The call's number on every architecture of Linux but Alpha.
_CACHESTAT = 451

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _Pages(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


def probe_cache(descriptor: int, offsets: range) -> tuple[bool, ...]:
    """Return for each part of a file whether it is cached, judged by one place in it.

    Args:
        descriptor: The file.
        offsets: Where the parts begin, up to the size of the file.

    Returns:
        A flag for each; empty where the kernel does not tell.
    """
    if not offsets or not _counts_pages(descriptor):
        return _refused_or_not(descriptor, offsets)
    found = []
    for offset in offsets:
        nbytes = min(options.PROBE_BYTES, offsets.step, offsets.stop - offset)
        # Half, not any: a header that was read there has brought some neighbours with it.
        found.append(2 * _cached_bytes(descriptor, offset, nbytes) >= nbytes)
    return tuple(found)


def _counts_pages(descriptor: int) -> bool:
    """Return whether a page that certainly is cached, as it was just read, is counted."""
    try:
        os.pread(descriptor, 1, 0)
    except OSError:  # a disk that fails says so again when the plan reads
        return False
    return _cached_bytes(descriptor, 0, 1) > 0


def _cached_bytes(descriptor: int, offset: int, nbytes: int) -> int:
    """Return the bytes of the pages of a range that are cached; 0 where the kernel does not tell."""
    if _libc is None:
        return 0
    place, pages = _Range(offset, nbytes), _Pages()
    refused = _libc.syscall(ctypes.c_long(_CACHESTAT), descriptor, ctypes.byref(place), ctypes.byref(pages), 0)
    return 0 if refused else int(pages.cached) * mmap.PAGESIZE


def _refused_or_not(descriptor: int, offsets: range) -> tuple[bool, ...]:
    nowait = getattr(os, "RWF_NOWAIT", None)
    if nowait is None:
        return ()
    found = []
    one = bytearray(1)
    for offset in offsets:
        anywhere = offset + secrets.randbelow(min(offsets.step, offsets.stop - offset))
        try:
            found.append(os.preadv(descriptor, [one], anywhere, nowait) == 1)
        except BlockingIOError:
            found.append(False)
        except OSError:  # unsupported here; a disk that fails says so again when the plan reads
            return ()
    return tuple(found)
