"""A cache directory: entries of remote objects, the bound of their bytes, and which of them are in use.

The directory has ``CACHEDIR.TAG``, ``lock``, ``objects/KEY/`` for each entry, and ``trash/`` for entries that are being
removed. Everything is changed under the lock of the state, so that any number of processes may share a directory. An
entry is charged before bytes are fetched for it, and never less than it has; the sum of the charges stays below the
bound.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress

from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice.sources.remote.cache_files import (
    EntryFiles,
    Header,
    OpenFiles,
    boot_id,
    file_name,
    last_use_ns,
    read_header,
)
from sluice.sources.remote.cache_locks import CacheLocks, StateLock

__all__ = ["CacheDirectory", "CacheEntry", "CachedObjectName", "cost_of"]

_TAG = "CACHEDIR.TAG"
_TAG_TEXT = """Signature: 8a477f597d28d172789f06886806bc55
# Parts of remote checkpoints, cached by sluice. Delete the directory to free the space.
# See https://bford.info/cachedir/
"""

#: Bytes that an entry is charged without blocks, and for the record of each block.
_ENTRY_BYTES, _RECORD_BYTES = 16 << 10, 8

#: An entry reserves at most this share of the bound in advance, because it may need no more than a slice.
_SHARES = 64

_KEY = re.compile("[0-9a-f]{64}")

_directories: weakref.WeakValueDictionary[str, CacheDirectory] = weakref.WeakValueDictionary()
_directories_lock = threading.Lock()


class CachedObjectName(Struct, frozen=True, kw_only=True):
    """The version of an object that an entry is for."""

    #: Name of the entry: 64 hexadecimal digits.
    key: str
    #: Address without credentials.
    address: str
    #: Version of the object.
    version: str
    #: Its size in bytes.
    nbytes: int


def blocks_of(nbytes: int) -> int:
    """Return the number of blocks of an object."""
    return -(-nbytes // defaults.CACHE_BLOCK_BYTES)


def cost_of(blocks: int) -> int:
    """Return the bytes that blocks are charged."""
    return blocks * (defaults.CACHE_BLOCK_BYTES + _RECORD_BYTES)


class CacheDirectory:
    """One cache directory; every method may be called from any thread."""

    def __init__(self, path: str) -> None:
        """Keep the path; see ``at``."""
        self.path = path
        self._objects, self._trash = (os.path.join(path, name) for name in ("objects", "trash"))
        self.locks = CacheLocks(os.path.join(path, "lock"))

    @classmethod
    def at(cls, path: str) -> CacheDirectory:
        """Return the directory at a path: the same object as long as another one uses it."""
        real = os.path.realpath(os.path.expanduser(path))
        with _directories_lock:
            found = _directories.get(real)
            if found is None:
                found = _directories[real] = cls(real)
            return found

    def open(self, name: CachedObjectName, bound: int) -> CacheEntry:
        """Return the entry of an object, made if it is missing, and mark it as used.

        Args:
            name: The object.
            bound: Most bytes of all entries together.

        Raises:
            OSError: The directory cannot be used, or the entry has no room.
        """
        self._prepare()
        files = EntryFiles(os.path.join(self._objects, name.key), file_name(name.address))
        with self.locks.state() as state:
            used = state.in_use(name.key)
            header = files.header()
            if header is not None and (header.nbytes != name.nbytes or not _is_data(files.data, name.nbytes)):
                header = None
            if header is None:
                if used:
                    raise OSError("the entry of the cache is damaged")
                self._remove(name.key)
                header = Header(nbytes=name.nbytes, charge=_ENTRY_BYTES, boot=boot_id())
                if not self._makes_room(state, bound, _ENTRY_BYTES, name.key):
                    raise _full()
                state.total = self._total(state) + _ENTRY_BYTES
                about = {"address": name.address, "version": name.version, "nbytes": name.nbytes}
                files.make(header, about)
            elif header.complete_ns and os.stat(files.data).st_mtime_ns != header.complete_ns:
                header = replace(header, complete_ns=0, boot=bytes(16))
                files.write_header(header)
            elif not header.complete_ns and not header.written_now:
                files.write_header(replace(header, boot=bytes(16)))
            files.touch()
            self.locks.use(name.key)
        return CacheEntry(self, name, files, bound, complete=bool(header.complete_ns))

    def reserve(self, entry: CacheEntry, nbytes: int, *, least: int) -> int:
        """Charge an entry before bytes are fetched for it, and return how many: ``nbytes``, or ``least`` if those fit.

        Other entries that are not in use are removed for it, the least recently used first.

        Raises:
            OSError: There is no room.
        """
        with self.locks.state() as state:
            header = entry.files.header()
            if header is None:
                raise OSError("the entry of the cache was removed")
            for wanted in dict.fromkeys((nbytes, least)):
                if self._makes_room(state, entry.bound, wanted, entry.name.key):
                    charge = min(header.charge + wanted, _ENTRY_BYTES + cost_of(blocks_of(header.nbytes)))
                    state.total = self._total(state) + charge - header.charge  # first: a crash must not lose it
                    entry.files.write_header(replace(header, charge=charge))
                    return wanted
        raise _full()

    def finish(self, entry: CacheEntry, release: Callable[[], object], blocks: int, opened: OpenFiles | None) -> None:
        """Remove the mark of an entry. If no one else uses it, charge it what it has, and complete it if it is whole.

        Args:
            entry: The entry.
            release: Removes its mark.
            blocks: Number of its blocks.
            opened: Its files, with data that was synchronized before, so that this is short; None if it is not whole.

        Raises:
            OSError: The system refuses.
        """
        with self.locks.state() as state:
            release()
            header = entry.files.header()
            if header is None or state.in_use(entry.name.key):
                return
            complete_ns = opened.sync() if opened is not None else 0
            charge = _ENTRY_BYTES + cost_of(blocks)
            entry.files.write_header(replace(header, charge=charge, complete_ns=complete_ns))
            entry.files.touch()
            state.total = self._total(state) + charge - header.charge

    def _prepare(self) -> None:
        fresh = not os.path.isdir(self.path) or not os.listdir(self.path)
        os.makedirs(self.path, 0o700, exist_ok=True)
        if fresh:  # tools for backups leave out tagged directories: never tag one that has other files
            with suppress(FileExistsError), open(os.path.join(self.path, _TAG), "x", encoding="ascii") as file:
                file.write(_TAG_TEXT)
        for path in (self._objects, self._trash):
            with suppress(FileExistsError):
                os.mkdir(path, 0o700)
            found = os.lstat(path)
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise PermissionError("other users own the cache or may write to it")

    def _makes_room(self, state: StateLock, bound: int, nbytes: int, key: str) -> bool:
        """Remove entries other than ``key`` until ``nbytes`` bytes have room; return whether they do."""
        if nbytes > bound or self._has_room(self._total(state), bound, nbytes):
            return nbytes <= bound
        entries = sorted(self._entries())
        total = sum(charge for _, charge, _ in entries)  # a process that died may have left the record too large
        unused = [(charge, other) for _, charge, other in entries if other != key and not state.in_use(other)]
        freed = sum(charge for charge, _ in unused)
        possible = self._has_room(total - freed, bound, nbytes, freed=freed)
        for charge, other in unused if possible else ():  # the least recently used first
            if self._has_room(total, bound, nbytes):
                break
            self._remove(other)
            total -= charge
        state.total = total
        return self._has_room(total, bound, nbytes)

    def _has_room(self, total: int, bound: int, nbytes: int, *, freed: int = 0) -> bool:
        found = os.statvfs(self.path)
        free = found.f_bavail * found.f_frsize + freed
        return total + nbytes <= bound and free - nbytes >= defaults.CACHE_FREE_BYTES

    def _total(self, state: StateLock) -> int:
        """Return what all entries are charged, at least. Looking at each takes 20 µs, so the sum is recorded."""
        total = state.total
        return sum(charge for _, charge, _ in self._entries()) if total is None else total

    def _entries(self) -> Iterator[tuple[int, int, str]]:
        """Yield time of last use, charge and key of each entry."""
        for key in filter(_KEY.fullmatch, os.listdir(self._objects)):
            directory = os.path.join(self._objects, key)
            header = read_header(directory)
            yield last_use_ns(directory), _ENTRY_BYTES if header is None else header.charge, key

    def _remove(self, key: str) -> None:
        """Remove an entry that no one uses, and what a process that died while it did that has left."""
        with suppress(FileNotFoundError):
            os.rename(os.path.join(self._objects, key), os.path.join(self._trash, uuid.uuid4().hex))
        for left in os.listdir(self._trash):
            shutil.rmtree(os.path.join(self._trash, left), ignore_errors=True)


class CacheEntry:
    """The entry of one object while a source uses it; every method may be called from any thread."""

    def __init__(
        self, directory: CacheDirectory, name: CachedObjectName, files: EntryFiles, bound: int, *, complete: bool
    ) -> None:
        """Take over the mark of a used entry; see ``CacheDirectory.open``."""
        self.directory, self.name, self.files, self.bound, self.complete = directory, name, files, bound, complete
        #: Why nothing more is cached, as a clause; None if nothing failed.
        self.problem: str | None = None
        self._lock, self._one_writer = threading.Lock(), threading.Lock()
        self._reserved = 0
        # An interrupt may keep the owner from closing it.
        self._finalizer = weakref.finalize(self, directory.locks.release, name.key)
        self._finalizer.atexit = False

    @property
    def open_for_use(self) -> bool:
        """Whether it was not closed."""
        return self._finalizer.alive

    @property
    def usable(self) -> bool:
        """Whether bytes are written to it: it was not closed, and nothing failed."""
        return self.problem is None and self.open_for_use

    def open(self) -> OpenFiles:
        """Open the files.

        Raises:
            OSError: The system refuses.
        """
        return OpenFiles(self.files, self.name.nbytes, self._one_writer)

    def failed(self, error: OSError) -> None:
        """Record that the system refuses: nothing more is cached, and the load continues without."""
        self.problem = self.problem or (error.strerror or str(error) or type(error).__name__)

    def reserve(self, blocks: int) -> None:
        """Charge blocks before they are fetched.

        Raises:
            OSError: There is no room.
        """
        with self._lock:
            needed = cost_of(blocks)
            if self._reserved < needed:
                missing = needed - self._reserved
                most = min(defaults.CACHE_RESERVED_BYTES, self.bound // _SHARES, cost_of(blocks_of(self.name.nbytes)))
                self._reserved += self.directory.reserve(self, max(missing, most), least=missing)
            self._reserved -= needed

    def close(self) -> None:
        """Stop using the entry; if it has all bytes, it becomes an ordinary file."""
        if not self._finalizer.alive:
            return
        try:
            if self.complete:
                return
            with self.open() as opened:
                blocks = opened.count()
                whole = self._is_whole(opened, blocks)
                if whole:
                    opened.sync()
                self.directory.finish(self, self._finalizer, blocks, opened if whole else None)
        except OSError as error:
            self.failed(error)
        finally:
            self._finalizer()  # if it was not finished

    def _is_whole(self, opened: OpenFiles, blocks: int) -> bool:
        if blocks < blocks_of(self.name.nbytes):
            return False
        header = self.files.header()
        if header is not None and not header.written_now:
            opened.forget_damaged()
            return opened.count() == blocks
        return True


def _is_data(path: str, nbytes: int) -> bool:
    """Return whether there is a file of this size, which is not a link."""
    with suppress(OSError):
        found = os.lstat(path)
        return stat.S_ISREG(found.st_mode) and found.st_size == nbytes
    return False


def _full() -> OSError:
    return OSError("its bound or the free space leaves no room")
