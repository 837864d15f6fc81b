"""Atomic replacement of one file: its name refers to the old content until the new content is durable.

The new file is written next to the old one under a hidden name, synced and renamed, and then the directory is synced.
A crash at any moment leaves the old file or the new one, and perhaps a hidden file, which the next save of the same
name removes (``partial_files``).
"""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import suppress
from typing import Self

from sluice import _defaults as defaults
from sluice._errors import SaveError
from sluice.engine.staging import StagingPool
from sluice.machine.filesystems import fallocate
from sluice.sources.local import kind_of_file
from sluice.writing.durable.direct import DirectWrites, direct_writes, write_all
from sluice.writing.durable.partial_files import (
    ATTEMPTS,
    close,
    hidden_path,
    remove_leftovers,
    saving,
    syncing,
    try_lock,
)

__all__ = ["Replacement", "WrittenFile", "saving"]

#: Errors of a link to a name that exists, and on file systems without hard links: ENOTSUP of macOS, EINVAL of Windows.
_NO_LINK = {errno.EEXIST, errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK, errno.EINVAL}


class WrittenFile:
    """An open file, which is written at any position and made durable; closed after its ``with`` block."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Store the path; nothing is opened yet."""
        self.path = os.fsdecode(path)
        self._descriptor = -1
        self._direct: DirectWrites | None = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, under its current name."""
        direct, self._direct = self._direct, None
        if direct is not None:
            direct.close()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            close(descriptor)

    def _bypass_cache(self, current: str, nbytes: int, staging: StagingPool | None) -> None:
        """Prepare direct writes of a large file, whose path is now ``current``."""
        if staging is not None and nbytes >= defaults.DIRECT_FILE_BYTES:
            self._direct = direct_writes(current, self._descriptor, staging)

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        """Write all of ``data`` at byte ``offset``; each byte of the file once. Thread-safe."""
        view = memoryview(data).cast("B")
        with saving(self.path):
            if self._direct is not None:
                self._direct.write(offset, view)
            else:
                write_all(self._descriptor, offset, view)

    def seal(self, *, nbytes: int | None = None) -> None:
        """Make the content durable, under the current name.

        Args:
            nbytes: Final size of the file in bytes; None keeps the written or reserved size.

        Raises:
            SaveError: The operating system failed.
        """
        with saving(self.path):
            if self._direct is not None:
                self._direct.settle()
            if nbytes is not None:
                os.ftruncate(self._descriptor, nbytes)
            os.fsync(self._descriptor)


class Replacement(WrittenFile):
    """A file that replaces or creates a path when ``commit`` is called inside its ``with`` block, and not before.

    Example:
        >>> with Replacement("model.bin", overwrite=True) as file:
        ...     file.write_at(0, b"abc")
        ...     file.commit()
    """

    def __init__(self, path: str | os.PathLike[str], *, overwrite: bool, in_set: bool = False) -> None:
        """Check the destination; nothing is changed.

        Args:
            path: The file to create or replace. Symbolic links are followed: their target is replaced.
            overwrite: Whether an existing file may be replaced.
            in_set: Whether it belongs to a set of files that is published together, in a directory that the caller has
                locked. A symbolic link at ``path`` is then replaced itself.

        Raises:
            SaveError: The path exists and may not or cannot be replaced.
        """
        super().__init__(path)
        self._overwrite = overwrite
        self._in_set = in_set
        with saving(self.path):
            self._final = self.path if in_set else os.path.realpath(self.path)
            self._directory, self._name = os.path.split(self._final)
            self._old = self._existing()
        #: The current path of the file, under which other processes write to it.
        self.hidden = ""

    def _existing(self) -> os.stat_result | None:
        """Return the status of the existing file; None if there is none."""
        try:
            status = os.lstat(self._final)
        except FileNotFoundError:
            return None
        if self._in_set and stat.S_ISLNK(status.st_mode):
            return None
        if not stat.S_ISREG(status.st_mode):
            raise SaveError("only a regular file can be replaced", file=self.path, found=kind_of_file(status.st_mode))
        if not self._overwrite:
            raise SaveError("the file already exists; pass overwrite=True to replace it", file=self.path)
        if not os.access(self._final, os.W_OK):
            raise SaveError("the file is read-only", file=self.path)
        return status

    def __enter__(self) -> Self:
        try:
            with saving(self.path):
                if not self._in_set:
                    remove_leftovers(self._directory, self._name)
                self._make_hidden()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _make_hidden(self) -> None:
        for _ in range(ATTEMPTS):
            self.hidden = hidden_path(self._directory, self._name, in_set=self._in_set)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
            self._descriptor = os.open(self.hidden, flags, 0o666)
            if self._in_set or (try_lock(self._descriptor) is not False and os.fstat(self._descriptor).st_nlink):
                return
            self.close()  # another writer removed it as a leftover before it was locked
        raise SaveError("other processes keep removing the hidden file of this save", file=self.path)

    def __exit__(self, *_: object) -> None:
        self._release()
        if self.hidden:
            with suppress(OSError):  # it was renamed, or cannot be removed: the next save retries
                os.unlink(self.hidden)
        self.close()

    def reserve(self, nbytes: int, staging: StagingPool | None = None) -> None:
        """Allocate disk space for ``nbytes`` bytes, so that a full disk is an error before the work starts.

        Args:
            nbytes: Expected size of the file.
            staging: Buffers for direct writes of large files; None writes through the page cache.
        """
        with saving(self.path):
            fallocate(self._descriptor, nbytes)
        self._bypass_cache(self.hidden, nbytes, staging)

    def seal(self, *, nbytes: int | None = None) -> None:
        """Make the content durable, with the owner and permissions of the replaced file."""
        if self._old is not None and hasattr(os, "fchown"):
            with saving(self.path):
                os.fchmod(self._descriptor, self._keep_owner(self._old))
        super().seal(nbytes=nbytes)
        if self._in_set:
            self.close()  # a set can have more files than a process has descriptors

    def _keep_owner(self, old: os.stat_result) -> int:
        """Keep the owner and the group if possible; return the permissions, without those that a lost group had."""
        for owner in (old.st_uid, -1):  # only root may change the owner; others their files' group to one of theirs
            new = os.fstat(self._descriptor)
            if (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid):
                with suppress(OSError):
                    os.fchown(self._descriptor, owner, old.st_gid)
        mode = stat.S_IMODE(old.st_mode)
        return mode if os.fstat(self._descriptor).st_gid == old.st_gid else mode & ~(0o070 & ~(mode << 3))

    def commit(self, *, nbytes: int | None = None) -> None:
        """Make the file durable and rename it into place.

        Args:
            nbytes: Final size of the file in bytes; None keeps the written or reserved size.

        Raises:
            SaveError: The operating system refused. The old file is intact, unless only the last step failed, the sync
                of the directory: then the complete new file is in place.
        """
        self.seal(nbytes=nbytes)
        with syncing(self._directory, self.path, commits=True):
            self.publish()

    def publish(self) -> None:
        """Rename the sealed file into place; the caller syncs the directory."""
        self._release()
        with saving(self.path):
            if self._overwrite:
                os.replace(self.hidden, self._final)
            else:
                self._link()

    def _release(self) -> None:
        """Close the file where only a closed one can be renamed or removed; elsewhere it stays locked."""
        if sys.platform == "win32":
            self.close()

    def _link(self) -> None:
        try:
            os.link(self.hidden, self._final)  # unlike a rename, fails if another process created the file
        except OSError as error:
            if error.errno not in _NO_LINK:
                raise
            if os.path.lexists(self._final):
                raise SaveError("another process created the file in the meantime", file=self.path) from error
            os.replace(self.hidden, self._final)

    @property
    def is_published(self) -> bool:
        """Whether the sealed file has its final name."""
        return not os.path.lexists(self.hidden)

    def withdraw(self) -> None:
        """Remove a published file, best effort."""
        with suppress(OSError):
            os.unlink(self._final)
