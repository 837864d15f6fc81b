"""Raw reads of a file: the lower bound of every loader's time."""

from __future__ import annotations

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

__all__ = ["READ_BYTES", "read_file"]

#: Bytes of one read.
READ_BYTES = 8 << 20

_HUGE_PAGE_BYTES = 2 << 20
_BLOCK_BYTES = 4096


def read_file(path: str, *, direct: bool, threads: int) -> mmap.mmap:
    """Read a whole file, or all files of a directory, into fresh anonymous memory and return it.

    Files follow each other in the memory, each from a multiple of 4096.

    Args:
        path: The file or directory.
        direct: Whether to bypass the page cache with O_DIRECT.
        threads: Number of threads; each has one read of ``READ_BYTES`` in flight.

    Raises:
        OSError: The file system refuses the read, for example direct I/O on tmpfs.
        EOFError: A file ended early.
    """
    files = sorted(entry.path for entry in os.scandir(path)) if os.path.isdir(path) else [path]
    sizes = [os.stat(file).st_size for file in files]
    whole = [-(-size // _BLOCK_BYTES) * _BLOCK_BYTES for size in sizes]
    room_bytes = -(-sum(whole) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    room = mmap.mmap(-1, room_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(room)
    with ExitStack() as stack:
        stack.callback(view.release)
        pieces: list[tuple[int, int, int, int]] = []  # descriptor, first byte in the memory, begin and end in the file
        first = 0
        for file, size, blocks in zip(files, sizes, whole, strict=True):
            descriptor = os.open(file, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            stack.callback(os.close, descriptor)
            starts = range(0, size, READ_BYTES)
            pieces += [(descriptor, first, start, min(start + READ_BYTES, size)) for start in starts]
            first += blocks
        with ThreadPoolExecutor(threads) as pool:
            for each in [pool.submit(_read_piece, view, path, *piece) for piece in pieces]:
                each.result()
    return room


def _read_piece(view: memoryview, path: str, descriptor: int, first: int, position: int, end: int) -> None:
    while position < end:
        # Direct reads request whole blocks; at the end of the file the kernel returns the remaining bytes.
        wanted = -(-(end - position) // _BLOCK_BYTES) * _BLOCK_BYTES
        count = os.preadv(descriptor, [view[first + position : first + position + wanted]], position)
        if count == 0:
            raise EOFError(f"{path} ended at byte {position}, before {end}")
        position += count
