"""Notices other processes that read the same file, and pages that were cached meanwhile.

Each process that reads a file directly holds a shared record lock (``F_OFD_SETLK``) on one byte far after its end, and
asks whether another one does (``F_OFD_GETLK``). Nothing is written, so read-only files and file systems work, and the
kernel drops the lock of a process that dies. The lock belongs to a descriptor: other loads of the same process are
noticed too, and closing it unlocks also for children that were forked meanwhile. Each question takes microseconds.
"""

from __future__ import annotations

import os
import struct
from typing import Self

from sluice.sources.descriptors import OwnedFile
from sluice.sources.page_counts import cached_bytes

__all__ = ["FileWatch"]

#: The locked byte. No file is this large; only locks of a whole file overlap with it.
_MARK = (1 << 62) + 0x51

#: ``struct flock``: type, whence, start, length, process.
_FLOCK = struct.Struct("@hhqqi0q")


class FileWatch:
    """A mark on a file for as long as this process reads it, through a descriptor of its own.

    Every method answers "no" if the system does not support the question.
    """

    def __init__(self, file: OwnedFile) -> None:
        """Own and mark an open file."""
        self._file = file
        _command(file, "F_OFD_SETLK", "F_RDLCK")

    @classmethod
    def open(cls, path: str) -> Self | None:
        """Mark a file; None if it cannot be opened."""
        try:
            return cls(OwnedFile.open(path))
        except OSError:
            return None

    def others_read(self) -> bool:
        """Return whether another process, or another load of this one, has marked the file."""
        import fcntl

        found = _command(self._file, "F_OFD_GETLK", "F_WRLCK")
        if found is None:
            return False
        kind, _, start, nbytes, _ = found
        return kind == fcntl.F_RDLCK and (start, nbytes) == (_MARK, 1)  # a different program may hold other locks

    def cached_share(self, offset: int, nbytes: int) -> float:
        """Return the cached share of a range, from 0 to 1."""
        return min(1.0, cached_bytes(self._file.fileno(), offset, nbytes) / nbytes)

    def close(self) -> None:
        """Remove the mark, also from descriptors that children inherited."""
        _command(self._file, "F_OFD_SETLK", "F_UNLCK")
        self._file.close()


def _command(file: OwnedFile, command: str, kind: str) -> tuple[int, int, int, int, int] | None:
    """Run a lock command, which never waits for a lock; return the resulting lock, or None if the system refuses."""
    try:
        import fcntl

        lock = _FLOCK.pack(getattr(fcntl, kind), os.SEEK_SET, _MARK, 1, 0)
        return _FLOCK.unpack(fcntl.fcntl(file, getattr(fcntl, command), lock))
    except (ImportError, AttributeError, OSError):
        return None
