"""One file written so that its name always means a whole file: the old one until the new one is on the disk.

The new file is written beside the old one under a hidden name, synced, given its name by a rename, and the directory
is synced after. A crash at any moment leaves the old file or the new one, and perhaps a hidden file, which the next
save of the same name removes. A hidden file is locked by its writer: no other writer takes a live one for a leftover.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Self

from sluice._errors import SaveError

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows refuses to delete files that are open, which protects a live one as well
    flock = None  # type: ignore[assignment]

__all__ = ["Replacement", "is_leftover", "locked_directory", "saving", "sync_directory"]

_SUFFIX = ".sluice-partial"

#: Longest name of most file systems, in bytes.
_NAME_BYTES = 255

#: Attempts to make a hidden file that nobody removed before it was locked; each failure takes another process's help.
_ATTEMPTS = 16


@contextmanager
def saving(path: str) -> Iterator[None]:
    """Turn the operating system's errors inside the block into ``SaveError``."""
    try:
        yield
    except OSError as error:
        raise SaveError(f"the operating system refused: {error.strerror or error}", file=path) from error


class Replacement:
    """A file under construction. Use it in a ``with`` block and ``commit`` it; without that, nothing has happened.

    Example:
        >>> with Replacement("model.bin", overwrite=True) as file:
        ...     file.write_at(0, b"abc")
        ...     file.commit()
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool) -> None:
        """Look at what is there; nothing is changed.

        Args:
            path: The file to make or replace. Symbolic links are followed: what they point to is replaced.
            overwrite: Whether a file that exists may be replaced.

        Raises:
            SaveError: Something is there that may not or can not be replaced.
        """
        self.path = os.fsdecode(path)
        self._overwrite = overwrite
        with saving(self.path):
            self._final = os.path.realpath(self.path)
            self._directory, self._name = os.path.split(self._final)
            self._mode = self._existing_mode()
        self._hidden = ""
        self._descriptor = -1

    def _existing_mode(self) -> int | None:
        """Return the permissions of the file that is there, or None for none."""
        try:
            found = os.lstat(self._final)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(found.st_mode):
            raise SaveError("only a regular file can be replaced", file=self.path, found=_kind(found.st_mode))
        if not self._overwrite:
            raise SaveError("the file exists already; say overwrite=True to replace it", file=self.path)
        return stat.S_IMODE(found.st_mode)

    def __enter__(self) -> Self:
        with saving(self.path):
            _remove_leftovers(self._directory, self._name)
            for _ in range(_ATTEMPTS):
                self._hidden = os.path.join(self._directory, _hidden_name(self._name))
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
                self._descriptor = os.open(self._hidden, flags, 0o666)
                if _lock(self._descriptor) and os.fstat(self._descriptor).st_nlink:
                    return self
                os.close(self._descriptor)  # another writer took it for a leftover before it was locked
            raise SaveError("hidden files of this save are removed as fast as they are made", file=self.path)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._hidden:
            with suppress(OSError):
                os.unlink(self._hidden)
        with suppress(OSError):
            os.close(self._descriptor)

    def reserve(self, nbytes: int) -> None:
        """Take the space for ``nbytes`` bytes now, so that a full disk is an error before the work, not after it."""
        if not nbytes or not hasattr(os, "posix_fallocate"):
            return
        with saving(self.path):
            try:
                os.posix_fallocate(self._descriptor, 0, nbytes)
            except OSError as error:
                if error.errno not in {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}:
                    raise

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at a position in the file, in bytes."""
        view = memoryview(data).cast("B")
        with saving(self.path):
            while view:
                written = os.pwrite(self._descriptor, view, offset)
                if not written:
                    raise OSError(errno.EIO, "nothing was written")
                offset, view = offset + written, view[written:]

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return bytes that were written before."""
        with saving(self.path):
            data = os.pread(self._descriptor, nbytes, offset)
            if not data:
                raise OSError(errno.EIO, "bytes that were written are not there")
            return data

    def commit(self, *, nbytes: int | None = None) -> None:
        """Give the file its name, once all of it is on the disk.

        Args:
            nbytes: Its size; None leaves it at what was written or reserved.

        Raises:
            SaveError: It could not be made durable or named. What was there before is still there, except when
                only the last step failed, the sync of the directory: then the new file has the name, whole.
        """
        with saving(self.path):
            if nbytes is not None:
                os.ftruncate(self._descriptor, nbytes)
            if self._mode is not None and hasattr(os, "fchmod"):
                os.fchmod(self._descriptor, self._mode)
            os.fsync(self._descriptor)
            self._name_it()
            self._hidden = ""
            sync_directory(self._directory)

    def _name_it(self) -> None:
        if self._overwrite:
            os.replace(self._hidden, self._final)
            return
        try:
            os.link(self._hidden, self._final)  # unlike a rename, it refuses when somebody was faster
        except FileExistsError as error:
            raise SaveError("the file was made by somebody else meanwhile", file=self.path) from error
        except OSError as error:
            if error.errno not in {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}:
                raise
            os.replace(self._hidden, self._final)  # a file system without hard links
            return
        os.unlink(self._hidden)


@contextmanager
def locked_directory(path: str) -> Iterator[None]:
    """Hold a directory's lock during the block, so that what another save left there is known to be dead.

    Raises:
        SaveError: Another save holds it.
    """
    if not hasattr(os, "O_DIRECTORY"):
        yield
        return
    with saving(path):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if not _lock(descriptor):
            raise SaveError("another save is writing to this directory", file=path)
        yield
    finally:
        os.close(descriptor)


def is_leftover(name: str, stem: str) -> bool:
    """Return whether a name is that of the hidden file of a killed save of ``stem`` and what follows it."""
    return name.startswith(f".{stem}") and name.endswith(_SUFFIX)


def sync_directory(path: str) -> None:
    """Make names in a directory durable; a no-op where directories cannot be opened (Windows)."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden_name(name: str) -> str:
    token = f".{secrets.token_hex(8)}{_SUFFIX}"
    return f".{_stem(name)}{token}"


def _stem(name: str) -> str:
    """Return as much of a name as fits beside the rest of a hidden name."""
    room = _NAME_BYTES - len(_SUFFIX) - 18
    return os.fsencode(name)[:room].decode(errors="ignore")


def _remove_leftovers(directory: str, name: str) -> None:
    """Remove the hidden files of saves of this name that were killed."""
    with os.scandir(directory) as entries:
        hidden = [entry.path for entry in entries if is_leftover(entry.name, f"{_stem(name)}.")]
    for path in hidden:
        with suppress(OSError):  # not ours to remove: the save itself will say what it cannot do
            descriptor = os.open(path, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
            try:
                if _lock(descriptor):
                    os.unlink(path)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool:
    """Return whether this process now holds the lock of an open file."""
    if flock is None:
        return True
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody else can hold one either
        return True
    return True


def _kind(mode: int) -> str:
    for test, name in (
        (stat.S_ISDIR, "a directory"),
        (stat.S_ISFIFO, "a FIFO"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISLNK, "a symbolic link that leads in a circle"),
    ):
        if test(mode):
            return name
    return "a device"
