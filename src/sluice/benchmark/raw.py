"""Raw reads of a file: the lower bound of every loader's time."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor

__all__ = ["READ_BYTES", "read_file"]

#: Bytes of one read.
READ_BYTES = 8 << 20

_HUGE_PAGE_BYTES = 2 << 20
_BLOCK_BYTES = 4096


def read_file(path: str, *, direct: bool, threads: int) -> mmap.mmap:
    """Read a whole file into fresh anonymous huge-page memory and return it.

    Args:
        path: The file.
        direct: Whether to bypass the page cache with O_DIRECT.
        threads: Number of threads; each has one read of ``READ_BYTES`` in flight.

    Raises:
        OSError: The file system refuses the read, for example direct I/O on tmpfs.
        EOFError: The file ended early.
    """
    size = os.stat(path).st_size
    room = mmap.mmap(-1, -(-size // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(room)
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))

    def read(start: int) -> None:
        position, end = start, min(start + READ_BYTES, size)
        while position < end:
            # Direct reads request whole blocks; at the end of the file the kernel returns the remaining bytes.
            wanted = -(-(end - position) // _BLOCK_BYTES) * _BLOCK_BYTES
            count = os.preadv(descriptor, [view[position : position + wanted]], position)
            if count == 0:
                raise EOFError(f"{path} ended at byte {position} of {size}")
            position += count

    try:
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(read, range(0, size, READ_BYTES)):
                pass
    finally:
        os.close(descriptor)
        view.release()
    return room
