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

from msgspec import Struct

from sluice import _defaults as defaults
from sluice._threads import stopping
from sluice.sources.descriptors import OwnedFile

try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
except ImportError:  # Windows
    flock = None  # type: ignore[assignment]

__all__ = ["CacheDirectory", "CacheEntry", "CacheFile"]

_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# Remote checkpoints, cached by sluice. Delete the directory to free the space. See https://bford.info/cachedir/
"""

_ENTRY = re.compile(r"([0-9a-f]{64}-(\d+))(\.part)?")

#: CRC-32 of a piece, and whether it was written.
_RECORD = struct.Struct("<II")

#: Time of change of complete files, in ns since 1970.
_RIGHT_NS = 1_000_000_000 * 10**9

#: Most by which the clocks of this machine and of a file server may differ, in ns.
_CLOCKS_NS = 10 * 10**9

#: Bytes of memory for comparing.
_BUFFER_BYTES = 1 << 20

#: Seconds after which a part that does not grow is given up.
_PATIENCE_SECONDS = 10.0


class CacheEntry(Struct, frozen=True, kw_only=True):
    """One version of an object."""

    #: 64 hexadecimal digits that depend on address, version and size.
    key: str
    #: Its size in bytes.
    nbytes: int
    #: Its version, with which the server named it.
    version: str | None = None

    @property
    def pieces(self) -> range:
        """Numbers of the pieces."""
        return range(-(-self.nbytes // defaults.CACHE_PIECE_BYTES))

    @property
    def record_bytes(self) -> int:
        """Bytes of the records at the end of the file."""
        return len(self.pieces) * _RECORD.size

    @property
    def name(self) -> str:
        """Name of the complete file."""
        return f"{self.key}-{self.nbytes + self.record_bytes}"

    def piece(self, number: int) -> tuple[int, int]:
        """Return the first byte of a piece, and the first byte after it."""
        start = number * defaults.CACHE_PIECE_BYTES
        return start, min(start + defaults.CACHE_PIECE_BYTES, self.nbytes)


class CacheFile(Struct, frozen=True):
    """The open file of an entry, in use until it is closed."""

    entry: CacheEntry
    path: str
    file: OwnedFile

    def arrived(self, number: int, crc: int) -> None:
        """Record a piece that was written."""
        os.pwrite(self.file.fileno(), _RECORD.pack(crc, 1), self.entry.nbytes + number * _RECORD.size)

    def right(self) -> set[int]:
        """Return the numbers of the pieces that equal their checksums."""
        records = os.pread(self.file.fileno(), self.entry.record_bytes, self.entry.nbytes)
        whole = records[: len(records) // _RECORD.size * _RECORD.size]
        return {
            number
            for number, (crc, written) in enumerate(_RECORD.iter_unpack(whole))
            if written == 1 and self._crc(number) == crc
        }

    def is_right(self) -> bool:
        """Return whether the file is complete and right; it is compared if it was changed since that was known."""
        found = os.fstat(self.file.fileno())
        known = found.st_mtime_ns == _RIGHT_NS and found.st_ctime_ns <= found.st_atime_ns + _CLOCKS_NS
        if found.st_size != self.entry.nbytes + self.entry.record_bytes:
            return False
        if not known and len(self.right()) < len(self.entry.pieces):
            return False
        self.stamp()
        return True

    def stamp(self) -> None:
        """Record that the file is right, and used now."""
        os.utime(self.file.fileno(), ns=(time.time_ns(), _RIGHT_NS))

    def _crc(self, number: int) -> int | None:
        (at, end), crc = self.entry.piece(number), 0
        while at < end:
            some = os.pread(self.file.fileno(), min(_BUFFER_BYTES, end - at), at)
            if not some:
                return None
            crc, at = zlib.crc32(some, crc), at + len(some)
        return crc


class CacheDirectory:
    """One cache directory, which any number of processes may use. Methods raise ``OSError`` if the system refuses."""

    def __init__(self, path: str | os.PathLike[str], bound: int) -> None:
        """Keep the path, and the most bytes of all entries together; nothing is made."""
        if flock is None:
            raise OSError("the system has no locks of open files")
        self.path, self.bound = os.path.realpath(os.path.expanduser(path)), bound

    def complete(self, entry: CacheEntry) -> CacheFile | None:
        """Return a complete file; None if it is missing.

        A damaged file becomes the part with which the next download begins.
        """
        path = self._path(entry)
        if not os.path.lexists(path):
            return None
        self._check()
        try:
            found = CacheFile(entry, path, _opened(path))
        except FileNotFoundError:
            return None
        if not _lock(found.file, LOCK_SH) or not _is_at(found.file, path):  # it is being removed
            return None
        if found.is_right():
            return found
        with suppress(FileNotFoundError):
            os.rename(path, f"{path}.part")
        return None

    @contextmanager
    def writing(self, entry: CacheEntry, waiting: Callable[[], object]) -> Iterator[CacheFile | None]:
        """Lend the part of an entry for writing, after other processes; None if one of them has completed it.

        Args:
            entry: What is downloaded; other entries are removed if it has no room.
            waiting: Called now and then while another process writes.
        """
        path = self._path(entry)
        os.makedirs(self.path, 0o700, exist_ok=True)
        self._check()
        while not os.path.lexists(path):
            with _opened(f"{path}.part", make=True) as part:
                if not _wait_for_writer(part, f"{path}.part", waiting):  # published or removed meanwhile
                    continue
                if os.path.lexists(path):
                    os.unlink(f"{path}.part")
                    break
                os.utime(part.fileno())  # comparing what is there may take a while
                self._make_room(entry, part)
                yield CacheFile(entry, f"{path}.part", part)
                return
        yield None

    def publish(self, part: CacheFile) -> None:
        """Give a part that has all bytes its final name."""
        descriptor = part.file.fileno()
        os.ftruncate(descriptor, part.entry.nbytes + part.entry.record_bytes)
        os.fsync(descriptor)
        flock(part.file, LOCK_SH)  # others may use it as soon as it has its name
        os.rename(part.path, self._path(part.entry))
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        part.stamp()

    def _path(self, entry: CacheEntry) -> str:
        return os.path.join(self.path, entry.name)

    def _check(self) -> None:
        """Refuse a directory that is not private; give a new one its tag."""
        found = os.lstat(self.path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(errno.EACCES, "other users own the cache or may write to it")
        if not os.listdir(self.path):  # never tag a directory that has other files
            with _opened(os.path.join(self.path, "CACHEDIR.TAG"), make=True) as tag:
                os.write(tag.fileno(), _TAG_TEXT)

    def _make_room(self, entry: CacheEntry, part: OwnedFile) -> None:
        """Remove files that no one uses, the least recently used first, until an entry has room."""
        sizes = {match[0]: int(match[2]) for match in map(_ENTRY.fullmatch, os.listdir(self.path)) if match}
        system, own = os.statvfs(self.path), entry.nbytes + entry.record_bytes
        missing = own - 512 * os.fstat(part.fileno()).st_blocks + defaults.CACHE_FREE_BYTES
        excess = max(sum(sizes.values()) - self.bound, missing - system.f_bavail * system.f_frsize)
        others = [name for name in sizes if not name.startswith(entry.name)] if excess > 0 else []
        if own <= self.bound and excess <= sum(sizes[name] for name in others):
            used = {name: _last_use(os.path.join(self.path, name)) for name in others}
            for name in sorted(others, key=lambda name: used[name]):
                with suppress(OSError), _opened(os.path.join(self.path, name)) as file:
                    if excess > 0 and _lock(file, LOCK_EX):
                        os.unlink(os.path.join(self.path, name))
                        excess -= sizes[name]
        if excess > 0 or own > self.bound:
            if not os.fstat(part.fileno()).st_size:
                os.unlink(f"{self._path(entry)}.part")
            raise OSError(errno.ENOSPC, "its bound or the free space leaves no room")


def _lock(file: OwnedFile, kind: int) -> bool:
    """Lock a file until it is closed; return whether no one else's lock forbids it."""
    try:
        flock(file, kind | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _last_use(path: str) -> int:
    try:
        return os.lstat(path).st_atime_ns
    except FileNotFoundError:
        return 0


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
            raise TimeoutError(errno.ETIMEDOUT, "the process that fills it is stopped")
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
