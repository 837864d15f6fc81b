"""A cache directory of whole remote files: names, locks, checksums, and removal of the least recently used.

Files, all of them regular ones of this user, opened without following links::

    CACHEDIR.TAG        tools for backups leave the directory out
    lock                locked (flock) while entries are added, published or removed
    KEY-NBYTES          a complete file
    KEY-NBYTES.part     the file while it is downloaded; locked by the process that writes it
    KEY-NBYTES.sums     checksums, see below; locked for sharing by those who use the entry

The sums begin with a line of JSON: address, version and size. A line ``NUMBER CRC`` follows for each piece of 8 MiB
after it was written, in any order, and ``=TIME`` for the last change (ctime) of a complete file that was right.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from msgspec import Struct

from sluice import _defaults as defaults
from sluice._threads import stopping

try:
    from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
except ImportError:  # Windows
    flock = None  # type: ignore[assignment]

__all__ = ["CacheDirectory", "CacheEntry", "OpenCacheEntry", "locks_work"]

_TAG = "CACHEDIR.TAG"
_TAG_TEXT = b"""Signature: 8a477f597d28d172789f06886806bc55
# Remote checkpoints, cached by sluice. Delete the directory to free the space. See https://bford.info/cachedir/
"""

_ENTRY = re.compile(r"(?P<name>[0-9a-f]{64}-(?P<nbytes>\d+))(\.part|\.sums)?")

#: Bytes of memory for comparing.
_BUFFER_BYTES = 1 << 20

#: Seconds after which the lock of the directory, held for milliseconds, or a part that does not grow is given up.
_PATIENCE_SECONDS = 10.0


class CacheEntry(Struct, frozen=True, kw_only=True):
    """One version of an object."""

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

    @property
    def pieces(self) -> range:
        """Numbers of the pieces."""
        return range(-(-self.nbytes // defaults.CACHE_PIECE_BYTES))

    def piece(self, number: int) -> tuple[int, int]:
        """Return the first byte of a piece, and the first byte after it."""
        start = number * defaults.CACHE_PIECE_BYTES
        return start, min(start + defaults.CACHE_PIECE_BYTES, self.nbytes)


class OpenCacheEntry(Struct, frozen=True):
    """Open files of an entry."""

    #: The entry.
    entry: CacheEntry
    #: Descriptor of the data.
    data: int
    #: Descriptor of the sums.
    sums: int

    def arrived(self, number: int, crc: int) -> None:
        """Record a piece that was written."""
        _append(self.sums, f"{number} {crc:08x}")

    def right(self) -> list[int]:
        """Return the numbers of the pieces that equal their checksums."""
        return [number for number, crc in _read_sums(self.sums)[0].items() if self._crc(number) == crc]

    def is_right(self) -> bool:
        """Return whether the data is complete and right; it is compared if it was changed since that was known."""
        (crcs, right_ns), found = _read_sums(self.sums), os.fstat(self.data)
        if found.st_size != self.entry.nbytes or len(crcs) != len(self.entry.pieces):
            return False
        if right_ns != found.st_ctime_ns:
            if len(self.right()) < len(crcs):
                return False
            self.stamp()
        return True

    def stamp(self) -> None:
        """Record that the data is right."""
        _append(self.sums, f"={os.fstat(self.data).st_ctime_ns}")

    def _crc(self, number: int) -> int | None:
        (at, end), crc = self.entry.piece(number), 0
        while at < end:
            some = os.pread(self.data, min(_BUFFER_BYTES, end - at), at)
            if not some:
                return None
            crc, at = zlib.crc32(some, crc), at + len(some)
        return crc


class CacheDirectory:
    """One cache directory, which any number of processes may use. Methods raise ``OSError`` if the system refuses."""

    def __init__(self, path: str | os.PathLike[str], bound: int) -> None:
        """Keep the path, and the most bytes of all entries together; nothing is made."""
        self.path, self.bound = os.path.realpath(os.path.expanduser(path)), bound

    def complete(self, entry: CacheEntry) -> tuple[int, str] | None:
        """Return a descriptor that marks a complete entry as used, and the path of its file; None if it is missing.

        A damaged file becomes the part with which the next download begins.
        """
        if not os.path.exists(os.path.join(self.path, entry.file)):
            return None
        with self._opened(entry, "") as part:
            if part.is_right():
                return os.dup(part.sums), os.path.join(self.path, entry.file)
            with self._locked() as directory, suppress(FileNotFoundError):
                os.rename(entry.file, f"{entry.file}.part", src_dir_fd=directory, dst_dir_fd=directory)
        return None

    @contextmanager
    def writing(self, entry: CacheEntry, report: Callable[[int], None]) -> Iterator[OpenCacheEntry | None]:
        """Lend the part of an entry for writing, after other processes; None if one of them has completed it.

        Args:
            entry: What is downloaded; other entries are removed if it has no room.
            report: Called with the bytes that another process has written so far.
        """
        with self._opened(entry, ".part") as part:
            _wait_for_writer(part, report)
            with self._locked() as directory:
                done = _size(directory, entry.file) is not None
                if done:
                    with suppress(FileNotFoundError):
                        os.unlink(f"{entry.file}.part", dir_fd=directory)
            yield None if done else part

    def publish(self, part: OpenCacheEntry) -> None:
        """Give a part that has all bytes its final name."""
        file = part.entry.file
        os.ftruncate(part.data, part.entry.nbytes)
        os.fsync(part.data)
        with self._locked() as directory:
            os.rename(f"{file}.part", file, src_dir_fd=directory, dst_dir_fd=directory)
            os.fsync(directory)
        part.stamp()

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """Lend the descriptor of the directory, which is made if it is missing; no one else changes it meanwhile."""
        os.makedirs(self.path, 0o700, exist_ok=True)
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            found = os.fstat(directory)
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise PermissionError(errno.EACCES, "other users own the cache or may write to it")
            if not os.listdir(directory):  # never tag a directory that has other files
                with _opened(directory, _TAG, make=True) as tag:
                    os.write(tag, _TAG_TEXT)
            with _opened(directory, "lock", make=True) as lock:
                deadline = time.monotonic() + _PATIENCE_SECONDS
                while not _lock(lock):
                    if time.monotonic() > deadline:
                        raise TimeoutError(errno.ETIMEDOUT, "a process that is stopped holds its lock")
                    time.sleep(0.005)
                yield directory
        finally:
            os.close(directory)

    @contextmanager
    def _opened(self, entry: CacheEntry, suffix: str) -> Iterator[OpenCacheEntry]:
        """Lend the open files of an entry, which is marked as used until its sums are closed."""
        with ExitStack() as stack:
            with self._locked() as directory:
                if suffix:
                    self._make_room(directory, entry)
                data = stack.enter_context(_opened(directory, entry.file + suffix, make=bool(suffix)))
                sums = stack.enter_context(_opened(directory, f"{entry.file}.sums", make=True))
                flock(sums, LOCK_SH | LOCK_NB)
                if not os.fstat(sums).st_size:
                    _append(sums, json.dumps({name: getattr(entry, name) for name in ("address", "version", "nbytes")}))
                os.utime(sums)
            yield OpenCacheEntry(entry, data, sums)

    def _make_room(self, directory: int, entry: CacheEntry) -> None:
        """Remove entries that no one uses, the least recently used first, until an object has room."""
        sizes = {match["name"]: int(match["nbytes"]) for match in map(_ENTRY.fullmatch, os.listdir(directory)) if match}
        total = sum(sizes.values()) + (0 if entry.file in sizes else entry.nbytes)
        found = os.statvfs(self.path)
        missing = entry.nbytes - (_size(directory, f"{entry.file}.part") or 0) + defaults.CACHE_FREE_BYTES
        excess = max(total - self.bound, missing - found.f_bavail * found.f_frsize)
        if excess <= 0:
            return
        since = {other: _unused_since(directory, other) for other in sizes if other != entry.file}
        unused = sorted((other for other in since if since[other]), key=lambda other: since[other])
        if entry.nbytes > self.bound or excess > sum(sizes[other] for other in unused):
            raise OSError(errno.ENOSPC, "its bound or the free space leaves no room")
        for other in unused:
            if excess > 0:
                for suffix in ("", ".part", ".sums"):  # the sums last: they are the entry
                    with suppress(FileNotFoundError):
                        os.unlink(other + suffix, dir_fd=directory)
                excess -= sizes[other]


def locks_work() -> bool:
    """Return whether the system has the locks that a cache needs."""
    return flock is not None


def _lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed; return whether no one else has."""
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _wait_for_writer(part: OpenCacheEntry, report: Callable[[int], None]) -> None:
    while not _lock(part.data):
        if time.time() - max(os.fstat(each).st_mtime for each in (part.data, part.sums)) > _PATIENCE_SECONDS:
            raise TimeoutError(errno.ETIMEDOUT, "the process that fills it is stopped")
        if stopping():
            raise InterruptedError(errno.EINTR, "the load has ended")
        report(min(len(_read_sums(part.sums)[0]) * defaults.CACHE_PIECE_BYTES, part.entry.nbytes))
        time.sleep(0.05)


@contextmanager
def _opened(directory: int, name: str, *, make: bool = False) -> Iterator[int]:
    """Open a file of the cache for reading and writing; links and files of other users are refused."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if make else 0)
    descriptor = os.open(name, flags, 0o600, dir_fd=directory)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or found.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, "a file in it is a link or belongs to another user")
        yield descriptor
    finally:
        os.close(descriptor)


def _append(sums: int, line: str) -> None:
    os.lseek(sums, 0, os.SEEK_END)
    os.write(sums, f"\n{line}\n".encode())  # on a line of its own, also after one that was not finished


def _read_sums(sums: int) -> tuple[dict[int, int], int]:
    """Return the CRC-32 of each piece by its number, and when the complete file was right, in ns; 0 if unknown."""
    crcs, right_ns = dict[int, int](), 0
    for line in os.pread(sums, os.fstat(sums).st_size, 0).split(b"\n")[:-1]:
        if found := re.fullmatch(rb"(\d{1,9}) ([0-9a-f]{8})", line):
            crcs[int(found[1])] = int(found[2], 16)
        elif found := re.fullmatch(rb"=(\d{1,19})", line):
            right_ns = int(found[1])
    return crcs, right_ns


def _unused_since(directory: int, name: str) -> int:
    """Return when an entry was used last, in ns; 0 if it is in use or not ours."""
    try:
        with _opened(directory, f"{name}.sums", make=True) as sums:
            return os.fstat(sums).st_mtime_ns if _lock(sums) else 0
    except OSError:
        return 0


def _size(directory: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=directory, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None
