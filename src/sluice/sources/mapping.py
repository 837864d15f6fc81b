"""Private mappings of files: pages that all processes share until one of them writes to them."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys

__all__ = ["map_privately"]

#: Python 3.11 has no name for it. Without it Linux reserves swap for every page that could be written to, and refuses
#: files larger than its memory.
_NORESERVE = 0x4000 if sys.platform == "linux" else 0

#: The same on Linux, macOS and the BSDs.
_FIXED = 0x10


def map_privately(descriptor: int, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Return a copy-on-write mapping of a range of a file, and where the range begins in it.

    The descriptor is not kept: one for each mapped file would soon be all that a process may have open.

    Raises:
        OSError: The system refuses.
    """
    lead = offset % mmap.ALLOCATIONGRANULARITY
    length = lead + nbytes
    if sys.platform == "win32":
        return mmap.mmap(descriptor, length, access=mmap.ACCESS_COPY, offset=offset - lead), lead
    # mmap.mmap duplicates the descriptor of a file for as long as it lives. So it gets anonymous address space, which
    # it unmaps in the end, and the file takes the place of that.
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
