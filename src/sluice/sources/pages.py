"""Pages of files in the page cache: private mappings, counts of cached pages, and a watch for other readers.

Linux 6.5 and later count the cached pages of a range (``cachestat``). Overlay file systems report none, because the
pages belong to the file below. ``mincore`` looks at a mapping, which is one of that file; it is also older. Both refuse
processes that neither own the file nor may write to it; ``mincore`` does so by calling all pages cached.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import struct
import sys
from typing import Self

from sluice.sources.descriptors import OwnedFile

__all__ = ["FileWatch", "cached_bytes", "map_privately", "resident_bytes"]

#: MAP_NORESERVE, which Python 3.11 does not define. Without it Linux reserves swap for every writable page, and refuses
#: files larger than memory.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0

#: MAP_FIXED, the same on Linux, macOS and the BSDs.
_FIXED = 0x10


def map_privately(descriptor: int, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Return a copy-on-write mapping of a range of a file, and the offset of the range in it.

    The descriptor is not kept: one per mapped file would soon exhaust the limit of the process.

    Raises:
        OSError: The system refuses the mapping.
    """
    lead = offset % mmap.ALLOCATIONGRANULARITY
    length = lead + nbytes
    if sys.platform == "win32":
        return mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=offset - lead), lead
    # mmap.mmap keeps a duplicate of the descriptor. So it gets anonymous address space, which it unmaps at the end, and
    # the file is mapped over that.
    flags = mmap.MAP_PRIVATE | _NORESERVE
    mapping = mmap.mmap(-1, length, flags=flags | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    found = library.mmap(address, length, protection, flags | _FIXED, descriptor, offset - lead)
    if found != address:
        number = ctypes.get_errno() or errno.EINVAL
        raise OSError(number, os.strerror(number))
    return mapping, lead


#: System call number on every Linux architecture except Alpha.
_CACHESTAT = 451


class _CachestatRange(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("nbytes", ctypes.c_uint64))


class _CachestatCounts(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def cached_bytes(descriptor: int, offset: int, nbytes: int) -> int:
    """Return the bytes of the cached pages of a range by ``cachestat``; 0 if the kernel does not count them."""
    if _libc is None:
        return 0
    place, pages = _CachestatRange(offset, nbytes), _CachestatCounts()
    refused = _libc.syscall(ctypes.c_long(_CACHESTAT), descriptor, ctypes.byref(place), ctypes.byref(pages), 0)
    return 0 if refused else int(pages.cached) * mmap.PAGESIZE


def resident_bytes(descriptor: int, offset: int, nbytes: int) -> int:
    """Return the bytes of the cached pages of a range by ``mincore``; 0 if it is refused.

    The range is mapped for the moment; no page of it is touched.

    Args:
        descriptor: The open file.
        offset: First byte.
        nbytes: Bytes of the range.
    """
    if _libc is None or not _may_ask(descriptor):
        return 0
    lead = offset % mmap.PAGESIZE
    try:
        mapping, _ = map_privately(descriptor, offset - lead, lead + nbytes)
    except (OSError, ValueError):  # the file system has no mappings
        return 0
    pages = ctypes.create_string_buffer(-(-(lead + nbytes) // mmap.PAGESIZE))
    first = ctypes.c_ubyte.from_buffer(mapping)
    address = ctypes.c_void_p(ctypes.addressof(first))
    refused = _libc.mincore(address, ctypes.c_size_t(lead + nbytes), pages)
    return 0 if refused else pages.raw.count(1) * mmap.PAGESIZE


def _may_ask(descriptor: int) -> bool:
    """Return whether ``mincore`` tells this process the truth about a file."""
    if os.geteuid() in {0, os.fstat(descriptor).st_uid}:
        return True
    return os.access(f"/proc/self/fd/{descriptor}", os.W_OK, effective_ids=True)


#: The first of the locked bytes. No file is this large; only locks of a whole file overlap with it.
_MARK = (1 << 62) + 0x51

#: ``struct flock``: type, whence, start, length, process.
_FLOCK = struct.Struct("@hhqqi0q")


class FileWatch:
    """A mark on a part of a file for as long as this process reads it, through a descriptor of its own.

    Each process that reads a file directly holds a shared record lock (``F_OFD_SETLK``) on one byte far after its end,
    another one for each part, and asks whether another process does (``F_OFD_GETLK``). Nothing is written, so read-only
    files and file systems work, and the kernel drops the lock of a process that dies. The lock belongs to a descriptor:
    other loads of the same process are noticed too, and closing it unlocks also for children that were forked
    meanwhile. Each question takes microseconds. Every method answers "no" if the system does not support the question.
    """

    def __init__(self, file: OwnedFile, part: int) -> None:
        """Own and mark an open file."""
        self._file, self._byte = file, _MARK + part
        _command(file, "F_OFD_SETLK", "F_RDLCK", self._byte)

    @classmethod
    def open(cls, path: str, part: int = 0) -> Self | None:
        """Mark a part of a file, an offset in it that stands for the part; None if it cannot be opened."""
        try:
            return cls(OwnedFile.open(path), part)
        except OSError:
            return None

    def others_read(self) -> bool:
        """Return whether another process, or another load of this one, has marked the part."""
        import fcntl

        found = _command(self._file, "F_OFD_GETLK", "F_WRLCK", self._byte)
        if found is None:
            return False
        kind, _, start, nbytes, _ = found
        return kind == fcntl.F_RDLCK and (start, nbytes) == (self._byte, 1)  # a different program may hold other locks

    def cached_share(self, offset: int, nbytes: int) -> float:
        """Return the cached share of a range, from 0 to 1."""
        return min(1.0, cached_bytes(self._file.fileno(), offset, nbytes) / nbytes)

    def close(self) -> None:
        """Remove the mark, also from descriptors that children inherited."""
        _command(self._file, "F_OFD_SETLK", "F_UNLCK", self._byte)
        self._file.close()


def _command(file: OwnedFile, command: str, kind: str, byte: int) -> tuple[int, int, int, int, int] | None:
    """Run a lock command for a byte, which never waits; return the resulting lock, or None if the system refuses."""
    try:
        import fcntl

        lock = _FLOCK.pack(getattr(fcntl, kind), os.SEEK_SET, byte, 1, 0)
        return _FLOCK.unpack(fcntl.fcntl(file, getattr(fcntl, command), lock))
    except (ImportError, AttributeError, OSError):
        return None
