"""Raw reads and writes of a file: the lower bounds of the time of loads and saves."""

from __future__ import annotations

import mmap
import os
import queue
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import accumulate

import numpy as np

__all__ = ["READ_BYTES", "read_file", "write_direct"]

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


def write_direct(path: str, parts: Sequence[np.ndarray], *, threads: int, piece_bytes: int) -> None:
    """Write bytes one after the other to a new file with O_DIRECT, through aligned buffers; nothing is synced.

    Args:
        path: The file.
        parts: The bytes, as flat arrays of uint8.
        threads: Number of threads; each has one buffer and one write in flight.
        piece_bytes: Bytes of one write, a multiple of 4096.

    Raises:
        OSError: The file system refuses direct writes, or failed.
    """
    *starts, total = accumulate(map(len, parts), initial=0)
    buffers: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()
    for _ in range(threads):
        buffer = mmap.mmap(-1, piece_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        buffer.madvise(mmap.MADV_HUGEPAGE)
        buffers.put(buffer)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT)

    def write(first: int) -> None:
        end, buffer = min(first + piece_bytes, total), buffers.get()
        array = np.frombuffer(buffer, np.uint8)
        number, at = bisect_right(starts, first) - 1, first
        while at < end:
            part = parts[number][at - starts[number] : end - starts[number]]
            array[at - first : at - first + len(part)] = part
            number, at = number + 1, at + len(part)
        view = memoryview(buffer)[: -(-(end - first) // _BLOCK_BYTES) * _BLOCK_BYTES]
        while view:  # a write that was cut short ends with a whole block
            written = os.pwrite(descriptor, view, first)
            first, view = first + written, view[written:]
        buffers.put(buffer)

    try:
        os.posix_fallocate(descriptor, 0, total)  # half the time of a file that grows
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(write, range(0, total, piece_bytes)))
        os.ftruncate(descriptor, total)
    finally:
        os.close(descriptor)
