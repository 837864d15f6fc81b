"""Private mappings of files: pages that all processes share until one of them writes to them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys

__all__ = ["map_privately"]

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
