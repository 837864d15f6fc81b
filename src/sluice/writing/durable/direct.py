"""Large writes that bypass the page cache: they run at the speed of the disk, and nothing is left to write back.

Whole blocks go through aligned staging buffers, from several threads at once. Smaller writes, and the bytes before the
first and after the last whole block, are collected in memory and written through the page cache in batches: file
systems block direct writes while a buffered write holds the file. No block is written both ways.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading

import numpy as np

from sluice import _defaults as defaults
from sluice.engine.staging import StagingPool
from sluice.machine.facts import takes_direct_io
from sluice.records.geometry import round_down, round_up
from sluice.writing.durable.partial_files import close

__all__ = ["DirectWrites", "block_bytes", "direct_writes", "write_all"]

#: Held while the position of a descriptor matters.
_seeking = threading.Lock()


def block_bytes() -> int:
    """Return the alignment of direct writes: no page of the cache may hold a block that is written directly."""
    return max(defaults.BLOCK_BYTES, mmap.PAGESIZE)


def write_all(descriptor: int, offset: int, view: memoryview) -> None:
    """Write all of ``view``, one-dimensional bytes, at a position in a file."""
    while view:
        written = _write_some(descriptor, view, offset)
        if not written:
            raise OSError(errno.EIO, "nothing was written")
        offset, view = offset + written, view[written:]


def _write_some(descriptor: int, view: memoryview, offset: int) -> int:
    if hasattr(os, "pwrite"):
        return os.pwrite(descriptor, view, offset)
    with _seeking:  # Windows
        os.lseek(descriptor, offset, os.SEEK_SET)
        return os.write(descriptor, view)


def direct_writes(path: str, descriptor: int, staging: StagingPool) -> DirectWrites | None:
    """Open a file that is being written a second time, for direct writes; None if they are not supported.

    Args:
        path: Its current path.
        descriptor: Its open descriptor.
        staging: Buffers of whole blocks, one per write at once.
    """
    if not hasattr(os, "O_DIRECT") or not takes_direct_io(path):
        return None
    try:
        direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None  # buffered writes work as well, or report the error
    try:
        if os.path.samestat(os.fstat(descriptor), os.fstat(direct)):
            return DirectWrites(descriptor, direct, staging)
    except OSError:
        pass
    close(direct)
    return None


class DirectWrites:
    """Writes to one file; call ``settle`` after the last."""

    def __init__(self, descriptor: int, direct: int, staging: StagingPool) -> None:
        self._descriptor = descriptor
        self._direct = direct
        self._staging = staging
        self._own = staging.blocks[0].mapping if staging.blocks else None
        self._refused = False
        self._lock = threading.Lock()
        self._small: list[tuple[int, bytes]] = []
        self._small_bytes = 0

    def write(self, offset: int, view: memoryview) -> None:
        """Write all of ``view`` at ``offset``; each byte of the file once. Thread-safe."""
        end = offset + len(view)
        first, last = round_up(offset, block_bytes()), round_down(end, block_bytes())
        if last - first < defaults.DIRECT_WRITE_BYTES:
            self._keep(offset, view)
            return
        reached = first + self._write_blocks(first, view[first - offset : last - offset])
        self._keep(offset, view[: first - offset])
        write_all(self._descriptor, reached, view[reached - offset : last - offset])
        self._keep(last, view[last - offset :])

    def settle(self) -> None:
        """Write all collected bytes."""
        with self._lock:
            self._write_small()

    def close(self) -> None:
        """Close the second descriptor; collected bytes are discarded."""
        close(self._direct)

    def _keep(self, offset: int, view: memoryview) -> None:
        if not view:
            return
        with self._lock:
            self._small.append((offset, bytes(view)))
            self._small_bytes += len(view)
            if self._small_bytes > defaults.SMALL_WRITES_BYTES or len(self._small) >= defaults.SMALL_WRITES:
                self._write_small()

    def _write_small(self) -> None:
        """Write all collected bytes, adjacent ones together."""
        waiting, self._small, self._small_bytes = sorted(self._small), [], 0
        joined = bytearray()
        start = 0
        for offset, data in waiting:
            if offset != start + len(joined):
                write_all(self._descriptor, start, memoryview(joined))
                joined, start = bytearray(), offset
            joined += data
        write_all(self._descriptor, start, memoryview(joined))

    def _write_blocks(self, offset: int, view: memoryview) -> int:
        """Write whole blocks; return the number of bytes written: fewer if refused, or a buffer is not aligned."""
        done = 0
        while done < len(view) and not self._refused:
            if view.obj is not self._own:
                written = self._write_copy(view[done:], offset + done)
            elif np.frombuffer(view, np.uint8).ctypes.data % block_bytes() == 0:
                written = self._write_once(view[done:], offset + done)
            else:  # never a second buffer: all writers may hold one and wait for each other
                break
            done += written
            if written == 0 or written % block_bytes():
                break
        return done

    def _write_copy(self, view: memoryview, offset: int) -> int:
        with self._staging.lent() as buffer:
            piece = buffer.view[: min(len(view), round_down(len(buffer.view), block_bytes()))]
            # Not a slice assignment, which holds the interpreter lock.
            np.copyto(np.frombuffer(piece, np.uint8), np.frombuffer(view, np.uint8, len(piece)))
            return self._write_once(piece, offset)

    def _write_once(self, view: memoryview, offset: int) -> int:
        try:
            return os.pwrite(self._direct, view, offset)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._refused = True
            return 0
