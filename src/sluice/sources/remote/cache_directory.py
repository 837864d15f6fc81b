"""A cache directory of whole remote files: names, locks, checksums, and removal of the least recently used.

Files, all of them regular ones of this user, opened without following links::

    CACHEDIR.TAG        tools for backups leave the directory out
    KEY-NBYTES          a complete file
    KEY-NBYTES.part     the file while it is downloaded

A file is locked (flock): shared by those who use it, exclusively by the process that downloads it or removes it. After
the content follows a record for each piece of 8 MiB, its CRC-32 and 1, which is written after the piece. A complete
file that is right has the time of change ``_RIGHT_NS``, which any write replaces. Its time of access is that of the
last use, as is the time of its status (ctime), unless a write was hidden.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple
from weakref import WeakSet

from sluice import _defaults as defaults
from sluice._threads import stopping
from sluice.sources.descriptors import OwnedFile, bounded

try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, LOCK_UN, flock
except ImportError:  # Windows
    flock = None  # type: ignore[assignment]

__all__ = ["CacheEntry", "CacheFile"]

_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# Remote checkpoints, cached by sluice. Delete the directory to free the space. See https://bford.info/cachedir/
"""

_ENTRY = re.compile(r"[0-9a-f]{64}-(\d+)(?:\.part)?")

#: CRC-32 of a piece, and whether it was written.
_RECORD = struct.Struct("<II")

#: Time of change of complete files, in ns since 1970.
_RIGHT_NS = 1_000_000_000 * 10**9

#: Most by which the clocks of this machine and of a file server may differ, in ns.
_CLOCKS_NS = 10 * 10**9

#: Seconds after which a part that does not grow is given up: longer than its writer asks a server that does not answer.
_PATIENCE_SECONDS = defaults.REMOTE_PATIENCE_SECONDS + 30

#: Complete files that this process uses.
_IN_USE: WeakSet[OwnedFile] = WeakSet()


class CacheEntry:
    """One version of an object in a cache directory, which any number of processes may use.

    Methods raise ``OSError`` if the system refuses.
    """

    def __init__(self, directory: str | os.PathLike[str], *, bound: int, key: str, nbytes: int) -> None:
        """Make nothing yet.

        Args:
            directory: The cache directory.
            bound: Most bytes of all its entries together.
            key: 64 hexadecimal digits that depend on address, version and size of the object.
            nbytes: Its size in bytes.
        """
        if flock is None:
            raise OSError("the system has no locks of open files")
        self.directory, self.bound = os.path.realpath(os.path.expanduser(directory)), bound
        self.nbytes, self.pid = nbytes, os.getpid()
        #: Numbers of the pieces.
        self.pieces = range(-(-nbytes // defaults.CACHE_PIECE_BYTES))
        #: Bytes of the file, with the records.
        self.file_bytes = nbytes + len(self.pieces) * _RECORD.size
        #: The complete file, and the file while it is downloaded.
        self.path = os.path.join(self.directory, f"{key}-{self.file_bytes}")
        self.part_path = f"{self.path}.part"

    def piece(self, number: int) -> tuple[int, int]:
        """Return the first byte of a piece, and the first byte after it."""
        start = number * defaults.CACHE_PIECE_BYTES
        return start, min(start + defaults.CACHE_PIECE_BYTES, self.nbytes)

    def complete(self) -> CacheFile | None:
        """Return the complete file; None if it is missing.

        A damaged file becomes the part with which the next download begins.
        """
        with suppress(FileNotFoundError):  # also if it is removed meanwhile
            self._check()
            found = CacheFile(self, _opened(self.path))
            for _ in range(100):  # a process that has waited for the part holds it for a moment
                if _lock(found.file, LOCK_SH):
                    break
                time.sleep(0.01)
            else:
                return None
            if _is_at(found.file, self.path):  # it is not being removed
                if found.is_right():
                    _IN_USE.add(found.file)
                    return found
                os.rename(self.path, self.part_path)
        return None

    @contextmanager
    def writing(self, waiting: Callable[[], object]) -> Iterator[CacheFile | None]:
        """Lend the part for writing, after other processes; None if one of them has completed it.

        Args:
            waiting: Called now and then while another process writes.
        """
        os.makedirs(self.directory, 0o700, exist_ok=True)
        self._check()
        if not os.listdir(self.directory):  # never tag a directory that has other files
            with _opened(os.path.join(self.directory, "CACHEDIR.TAG"), make=True) as tag:
                os.write(tag.fileno(), _TAG_TEXT)
        while not os.path.lexists(self.path):
            with _opened(self.part_path, make=True) as part:
                if not _wait_for_writer(part, self.part_path, waiting):  # published or removed meanwhile
                    continue
                if os.path.lexists(self.path):
                    os.unlink(self.part_path)
                    break
                writing = CacheFile(self, part)
                try:
                    os.utime(part.fileno())  # comparing what is there may take a while
                    self._make_room(part)
                    yield writing
                finally:
                    writing.unlock()
                return
        yield None

    def _check(self) -> None:
        """Refuse a directory that is not private, and more files than the process can have open."""
        found = os.lstat(self.directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EACCES, "other users own the cache or may write to it")
        if len(_IN_USE) >= bounded(defaults.CACHED_OPEN_FILES, 2):
            raise OSError(errno.EMFILE, "too many of its files are in use at once (ulimit -n)")

    def _make_room(self, part: OwnedFile) -> None:
        """Remove files that no one uses, the least recently used first, until this one has room."""
        found = map(_ENTRY.fullmatch, os.listdir(self.directory))
        sizes = {os.path.join(self.directory, match[0]): int(match[1]) for match in found if match}
        system, unused, missing = os.statvfs(self.directory), dict[str, int](), defaults.CACHE_FREE_BYTES
        for path, nbytes in sizes.items():
            with suppress(OSError), _opened(path) as file:
                status = os.fstat(file.fileno())
                if path not in {self.path, self.part_path} and _lock(file, LOCK_EX):
                    unused[path] = status.st_atime_ns
                elif path.endswith(".part"):  # other processes write as well
                    missing += nbytes - 512 * status.st_blocks
        excess = max(sum(sizes.values()) - self.bound, missing - system.f_bavail * system.f_frsize)
        if 0 < excess <= sum(sizes[path] for path in unused):
            for path in sorted(unused, key=unused.__getitem__):
                with suppress(OSError), _opened(path) as file:
                    if excess > 0 and _lock(file, LOCK_EX):
                        os.unlink(path)
                        excess -= sizes[path]
        if excess > 0:
            if not os.fstat(part.fileno()).st_size:
                os.unlink(self.part_path)
            raise OSError(errno.ENOSPC, "its bound or the free space leaves no room")


class CacheFile(NamedTuple):
    """The open file of an entry, in use until it is closed."""

    entry: CacheEntry
    file: OwnedFile

    def unlock(self) -> None:
        """End its use, also if a child has inherited the lock; a child itself does not end the use of its parent."""
        if os.getpid() == self.entry.pid:
            flock(self.file, LOCK_UN)

    def arrived(self, number: int, crc: int) -> None:
        """Record a piece that was written."""
        os.pwrite(self.file.fileno(), _RECORD.pack(crc, 1), self.entry.nbytes + number * _RECORD.size)

    def right(self) -> set[int]:
        """Return the numbers of the pieces that equal their checksums."""
        records = os.pread(self.file.fileno(), self.entry.file_bytes - self.entry.nbytes, self.entry.nbytes)
        found = enumerate(_RECORD.iter_unpack(records[: len(records) // _RECORD.size * _RECORD.size]))
        return {number for number, (crc, written) in found if written == 1 and crc == self._crc(number)}

    def is_right(self) -> bool:
        """Return whether the file is complete and right; it is compared if it was changed since that was known."""
        found = os.fstat(self.file.fileno())
        known = found.st_mtime_ns == _RIGHT_NS and found.st_ctime_ns <= found.st_atime_ns + _CLOCKS_NS
        right = found.st_size == self.entry.file_bytes and (known or len(self.right()) == len(self.entry.pieces))
        if right:
            os.utime(self.file.fileno(), ns=(time.time_ns(), _RIGHT_NS))
        return right

    def publish(self) -> None:
        """Give a part that has all bytes its final name."""
        os.ftruncate(self.file.fileno(), self.entry.file_bytes)
        os.fsync(self.file.fileno())
        flock(self.file, LOCK_SH)  # others may use it as soon as it has its name
        with suppress(FileNotFoundError):  # the lock is dropped in between: another process may have published it
            os.rename(self.entry.part_path, self.entry.path)
        os.utime(self.file.fileno(), ns=(time.time_ns(), _RIGHT_NS))

    def _crc(self, number: int) -> int:
        (at, end), crc = self.entry.piece(number), 0
        while some := os.pread(self.file.fileno(), min(1 << 20, end - at), at):
            crc, at = zlib.crc32(some, crc), at + len(some)
        return crc


def _lock(file: OwnedFile, kind: int) -> bool:
    """Lock a file until it is closed; return whether no one else's lock forbids it."""
    try:
        flock(file, kind | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: OwnedFile, path: str) -> bool:
    """Return whether an open file still has its name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(path))
    except FileNotFoundError:
        return False


def _wait_for_writer(part: OwnedFile, path: str, waiting: Callable[[], object]) -> bool:
    """Lock a part for this process alone; return whether it still has its name then."""
    while not _lock(part, LOCK_EX):
        still = time.time() - os.fstat(part.fileno()).st_mtime > _PATIENCE_SECONDS
        if not _is_at(part, path):  # published: others hold it, and its time of change is that of right files
            return False
        if still:
            problem = f"the process that fills it has written nothing for {_PATIENCE_SECONDS:g} s"
            raise TimeoutError(errno.ETIMEDOUT, problem)
        if stopping():
            raise InterruptedError(errno.EINTR, "the load has ended")
        waiting()
        time.sleep(0.05)
    return _is_at(part, path)


def _opened(path: str, *, make: bool = False) -> OwnedFile:
    """Open a file of the cache for reading and writing; links and files of other users are refused."""
    file = OwnedFile.open(path, os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if make else 0))
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid != os.geteuid():
        raise PermissionError(errno.EACCES, "a file in it is a link or belongs to another user")
    return file
