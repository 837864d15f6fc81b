"""A cache directory of whole remote files: names, locks, removal of what was not used for longest, and damage.

Files, all of them regular ones of this user, opened without following links::

    CACHEDIR.TAG        tools for backups leave the directory out
    lock                locked (flock) while entries are added, published or removed
    KEY-NBYTES          a complete file
    KEY-NBYTES.part     the file while it arrives
    KEY-NBYTES.sums     what is known about it, see below; locked for sharing by those who use the entry

The sums have one line each: JSON with address, version and size; then the CRC-32 of each piece of 8 MiB, in order,
written after the piece; ``?`` when a process begins to compare an older part with them, and ``!`` when it has; and
``=TIME``, the last change (ctime) of the complete file when it was known to be right.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from msgspec import Struct

from sluice import _defaults as defaults

try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
except ImportError:  # Windows
    flock = None  # type: ignore[assignment]

__all__ = [
    "CacheDirectory",
    "CachedObjectName",
    "Sums",
    "append",
    "is_damaged",
    "lock_part",
    "locks_work",
    "open_file",
    "pieces_of",
]

_TAG = "CACHEDIR.TAG"
_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# Remote checkpoints, cached by sluice. Delete the directory to free the space. See https://bford.info/cachedir/
"""

_ENTRY = re.compile(r"(?P<name>[0-9a-f]{64}-(?P<nbytes>\d+))(\.part|\.sums)?")

#: Bytes of memory for comparing.
_BUFFER_BYTES = 1 << 20

#: Seconds after which the lock of the directory is given up. It is held for milliseconds.
_PATIENCE_SECONDS = 10.0


class CachedObjectName(Struct, frozen=True, kw_only=True):
    """The version of an object that an entry is for."""

    #: 64 hexadecimal digits that depend on address, version and size.
    key: str
    #: Address without credentials.
    address: str
    #: Version of the object.
    version: str
    #: Its size in bytes.
    nbytes: int

    @property
    def file(self) -> str:
        """Name of the complete file."""
        return f"{self.key}-{self.nbytes}"


class Sums(Struct, frozen=True):
    """The content of the sums of an entry."""

    #: CRC-32 of each piece from the first one on.
    pieces: tuple[int, ...] = ()
    #: Whether a process that may have ended was comparing the pieces.
    doubtful: bool = False
    #: Last change of the complete file when it was known to be right, in ns; 0 if unknown.
    right_ns: int = 0

    @classmethod
    def read(cls, descriptor: int) -> Sums:
        """Return the sums of an entry; what a killed process did not finish to write is left out."""
        lines = os.pread(descriptor, os.fstat(descriptor).st_size, 0).split(b"\n")[1:-1]
        with suppress(ValueError):
            pieces = tuple(int(line, 16) for line in lines if line[:1] not in (b"?", b"!", b"="))
            stamps = [int(line[1:]) for line in lines if line[:1] == b"="]
            marks = [line for line in lines if line in (b"?", b"!")]
            return cls(pieces, marks[-1:] == [b"?"], stamps[-1] if stamps else 0)
        return cls()


def locks_work() -> bool:
    """Return whether the system has the locks that a cache needs."""
    return flock is not None


def lock_part(part: int) -> bool:
    """Lock a part for writing until its descriptor is closed; return whether no other process writes it."""
    try:
        flock(part, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def open_file(directory: int, name: str, *, make: bool = False) -> int:
    """Open a file of the cache for reading and writing, and return its descriptor.

    Raises:
        OSError: It is missing, a link, has several names, or belongs to another user.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if make else 0)
    descriptor = os.open(name, flags, 0o600, dir_fd=directory)
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode) and found.st_nlink == 1 and found.st_uid == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EACCES, "a file in it is a link or belongs to another user")


class CacheDirectory:
    """One cache directory, which any number of processes may use."""

    def __init__(self, path: str | os.PathLike[str], bound: int) -> None:
        """Keep the path; nothing is made.

        Args:
            path: The directory.
            bound: Most bytes of all entries together.
        """
        self.path, self.bound = os.path.realpath(os.path.expanduser(path)), bound

    @contextmanager
    def locked(self) -> Iterator[int]:
        """Lend the descriptor of the directory, which is made if it is missing; no one else changes it meanwhile.

        Raises:
            OSError: The system refuses, or other users may write to the directory.
        """
        os.makedirs(self.path, 0o700, exist_ok=True)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(directory)
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise PermissionError(errno.EACCES, "other users own the cache or may write to it")
            if not os.listdir(directory):  # never tag a directory that has other files
                with open(open_file(directory, _TAG, make=True), "wb") as tag:
                    tag.write(_TAG_TEXT)
            lock = open_file(directory, "lock", make=True)
            try:
                _wait_for(lock)
                yield directory
            finally:
                os.close(lock)
        finally:
            os.close(directory)

    def complete(self, name: CachedObjectName) -> tuple[int, str] | None:
        """Return the mark of use of a complete entry, a descriptor, and the path of its file; None if it is missing.

        A file that was changed since it was known to be right is compared with its sums. If it is damaged, it becomes
        the part from which the next read continues.
        """
        if not os.path.isdir(self.path):
            return None
        with self.locked() as directory:
            try:
                data = open_file(directory, name.file)
            except FileNotFoundError:
                return None
            try:
                mark = self.use(directory, name)
            except BaseException:
                os.close(data)
                raise
        try:
            if self._is_right(data, mark, name):
                return mark, os.path.join(self.path, name.file)
            append(mark, "?")
            with self.locked() as directory, suppress(FileNotFoundError):
                os.rename(name.file, f"{name.file}.part", src_dir_fd=directory, dst_dir_fd=directory)
        except BaseException:
            os.close(mark)
            raise
        finally:
            os.close(data)
        os.close(mark)
        return None

    def _is_right(self, data: int, mark: int, name: CachedObjectName) -> bool:
        sums, found = Sums.read(mark), os.fstat(data)
        if found.st_size != name.nbytes or len(sums.pieces) != pieces_of(name.nbytes):
            return False
        if sums.right_ns == found.st_ctime_ns:
            return True
        if any(is_damaged(data, number, crc, name.nbytes) for number, crc in enumerate(sums.pieces)):
            return False
        append(mark, f"={found.st_ctime_ns}")
        return True

    def use(self, directory: int, name: CachedObjectName) -> int:
        """Mark an entry as used until the returned descriptor of its sums is closed. The directory is locked."""
        mark = open_file(directory, f"{name.file}.sums", make=True)
        try:
            flock(mark, LOCK_SH | LOCK_NB)
            if not os.fstat(mark).st_size:
                append(mark, json.dumps({"address": name.address, "version": name.version, "nbytes": name.nbytes}))
            os.utime(mark)
        except BaseException:
            os.close(mark)
            raise
        return mark

    def make_room(self, directory: int, name: CachedObjectName) -> None:
        """Remove entries that no one uses, the least recently used first, until an object has room.

        Raises:
            OSError: There is not enough.
        """
        sizes = {match["name"]: int(match["nbytes"]) for match in map(_ENTRY.fullmatch, os.listdir(directory)) if match}
        total = sum(sizes.values()) + (0 if name.file in sizes else name.nbytes)
        found = os.statvfs(self.path)
        missing = name.nbytes - _size(directory, f"{name.file}.part") + defaults.CACHE_FREE_BYTES
        excess = max(total - self.bound, missing - found.f_bavail * found.f_frsize)
        if excess <= 0:
            return
        unused = sorted((_unused_since(directory, other), other) for other in sizes if other != name.file)
        unused = [(since_ns, other) for since_ns, other in unused if since_ns]
        if name.nbytes > self.bound or excess > sum(sizes[other] for _, other in unused):
            raise OSError(errno.ENOSPC, "its bound or the free space leaves no room")
        for _, other in unused:
            if excess > 0:
                _remove(directory, other)
                excess -= sizes[other]

    def publish(self, name: CachedObjectName, part: int, mark: int) -> None:
        """Give a part that has all bytes its final name."""
        os.ftruncate(part, name.nbytes)
        os.fsync(part)
        with self.locked() as directory:
            os.rename(f"{name.file}.part", name.file, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)
        append(mark, f"={os.fstat(part).st_ctime_ns}")


def _wait_for(lock: int) -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        try:
            flock(lock, LOCK_EX | LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "a process that is stopped holds its lock") from None
            time.sleep(0.005)
        else:
            return


def pieces_of(nbytes: int) -> int:
    """Return the number of pieces of a file."""
    return -(-nbytes // defaults.CACHE_PIECE_BYTES)


def is_damaged(data: int, number: int, crc: int, nbytes: int) -> bool:
    """Return whether a piece of a file of ``nbytes`` bytes differs from its CRC-32, or is missing."""
    at, found = number * defaults.CACHE_PIECE_BYTES, 0
    end = min(at + defaults.CACHE_PIECE_BYTES, nbytes)
    while at < end:
        some = os.pread(data, min(_BUFFER_BYTES, end - at), at)
        if not some:
            return True
        found, at = zlib.crc32(some, found), at + len(some)
    return found != crc


def append(mark: int, line: str) -> None:
    """Add a line to the sums."""
    os.lseek(mark, 0, os.SEEK_END)
    os.write(mark, f"{line}\n".encode())


def _unused_since(directory: int, name: str) -> int:
    """Return when an entry was used last, in ns; 0 if it is in use or not ours."""
    try:
        mark = open_file(directory, f"{name}.sums", make=True)
    except OSError:
        return 0
    try:
        flock(mark, LOCK_EX | LOCK_NB)
        return os.fstat(mark).st_mtime_ns
    except OSError:
        return 0
    finally:
        os.close(mark)


def _remove(directory: int, name: str) -> None:
    for suffix in ("", ".part", ".sums"):  # the sums last: they are the entry
        with suppress(FileNotFoundError):
            os.unlink(name + suffix, dir_fd=directory)


def _size(directory: int, name: str) -> int:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0
