"""Locks of a cache directory: one for its state, held for a moment, and one for each entry, shared by its users.

Each lock is one byte of the lock file (``F_OFD_SETLK``), so that a process needs one descriptor for any number of
entries, and the kernel drops the locks of a process that dies. The bytes need not exist. The file itself holds the sum
of what the entries are charged.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["CacheLocks", "StateLock", "locks_work"]

#: ``struct flock``: type, whence, start, length, process.
_FLOCK = struct.Struct("@hhqqi0q")

#: Mark, and the sum of the charges.
_TOTAL = struct.Struct("<8sQ")
_MARK = b"sluice\x00\x01"

#: Byte that is locked while the state of the cache is read or changed.
_STATE = 0

#: Seconds after which the state lock is given up, and between two attempts. It is held for milliseconds, unless its
#: process was stopped.
_PATIENCE_SECONDS, _PAUSE_SECONDS = 10.0, 0.001


def locks_work() -> bool:
    """Return whether the system has locks that belong to an open file, as Linux has."""
    try:
        import fcntl
    except ImportError:
        return False
    return hasattr(fcntl, "F_OFD_SETLK")


class StateLock:
    """The locked state of a cache. Its lock file was opened for it, so that locks of the same process conflict too."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def total(self) -> int | None:
        """Sum of the charges in bytes, never less than it is; None if it was not recorded."""
        found = os.pread(self._descriptor, _TOTAL.size, 0)
        mark, total = _TOTAL.unpack(found) if len(found) == _TOTAL.size else (b"", 0)
        return total if mark == _MARK else None

    @total.setter
    def total(self, nbytes: int) -> None:
        os.pwrite(self._descriptor, _TOTAL.pack(_MARK, max(0, nbytes)), 0)

    def in_use(self, key: str) -> bool:
        """Return whether any process uses an entry."""
        import fcntl

        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _byte_of(key), 1, 0)
        found: int = _FLOCK.unpack(fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, asked))[0]
        return found != fcntl.F_UNLCK


class CacheLocks:
    """The lock file of a cache directory; every method may be called from any thread."""

    def __init__(self, path: str) -> None:
        """Keep the path of the lock file, which is made by the first lock."""
        self._path = path
        self._one_at_a_time = threading.Lock()
        self._guard = threading.Lock()
        self._uses: Counter[str] = Counter()
        self._descriptor: int | None = None
        self._process = os.getpid()

    @contextmanager
    def state(self) -> Iterator[StateLock]:
        """Lock the state for the block.

        Raises:
            OSError: The file cannot be opened, or another process has held the lock for ten seconds.
        """
        import fcntl

        deadline = time.monotonic() + _PATIENCE_SECONDS
        if not self._one_at_a_time.acquire(timeout=_PATIENCE_SECONDS):
            raise TimeoutError("the cache is locked")
        try:
            descriptor = self._open()
            try:
                while not _set(descriptor, fcntl.F_WRLCK, _STATE):
                    if time.monotonic() > deadline:
                        raise TimeoutError("the cache is locked")
                    time.sleep(_PAUSE_SECONDS)
                yield StateLock(descriptor)
            finally:
                os.close(descriptor)  # unlocks
        finally:
            self._one_at_a_time.release()

    def use(self, key: str) -> None:
        """Mark an entry as used by this process; called under the state lock, once for each ``release``.

        Raises:
            OSError: The file cannot be opened or locked.
        """
        import fcntl

        with self._guard:
            if self._process != os.getpid():  # the marks belong to the process that forked this one
                self._uses.clear()
                self._descriptor, self._process = None, os.getpid()
            if self._descriptor is None:
                self._descriptor = self._open()
            if not self._uses[key] and not _set(self._descriptor, fcntl.F_RDLCK, _byte_of(key)):
                raise BlockingIOError("the entry is locked")
            self._uses[key] += 1

    def release(self, key: str) -> None:
        """Remove one mark of an entry."""
        import fcntl

        with self._guard:
            if self._process != os.getpid() or self._descriptor is None:
                return
            self._uses[key] -= 1
            if self._uses[key] > 0:
                return
            del self._uses[key]
            with suppress(OSError):
                # Closing is not enough: children that were forked meanwhile hold the descriptor too.
                _set(self._descriptor, fcntl.F_UNLCK, _byte_of(key))
            if not self._uses:
                os.close(self._descriptor)
                self._descriptor = None

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _byte_of(key: str) -> int:
    """Return the byte of an entry. Two entries may share one: either then counts as used if the other is."""
    return 1 + int(key[:15], 16)


def _set(descriptor: int, kind: int, byte: int) -> bool:
    """Lock or unlock a byte without waiting; return whether it was possible."""
    import fcntl

    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    except PermissionError:  # EACCES: some systems say this of a held lock
        return False
    return True
