"""Local files, read with ``preadv`` through descriptors of a bounded cache: one buffered, one for direct I/O.

Without ``preadv`` (macOS before 11, Windows), reads fall back to a locked seek and read. Paths that are not regular
files are refused before they are opened: opening a FIFO would block forever.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

from sluice._defaults import BLOCK_BYTES
from sluice._errors import (
    BudgetError,
    CheckpointError,
    MissingFileError,
    SourceChangedError,
    TruncatedError,
    UnsupportedError,
)
from sluice._messages import read_error
from sluice.records import FileIdentity, local_access
from sluice.sources.descriptors import DESCRIPTORS, OwnedFile
from sluice.sources.pages import FileWatch, map_privately
from sluice.sources.protocol import DirectIOUnavailable
from sluice.sources.wrappers import RangedSource, too_early

__all__ = ["LocalFile", "kind_of_file"]

_HAS_PREADV = hasattr(os, "preadv")

#: Pauses before a read is retried that was interrupted (EINTR) or temporarily refused (EAGAIN), as FUSE and network
#: file systems may do; after the last retry the error is raised.
_PAUSES_SECONDS = (0.001, 0.01, 0.1, None)

#: Errors of open and read with which file systems refuse direct I/O; the first one also means a wrong alignment.
_REFUSED_DIRECT = frozenset({errno.EINVAL, errno.EOPNOTSUPP})


class LocalFile(RangedSource):
    """A regular file; see ``Source``."""

    #: Replaced first: an interrupt may end the constructor.
    _key: object = None

    def __init__(
        self, path: str | os.PathLike[str], *, shown: str = "", note: str | None = None, trailer_bytes: int = 0
    ) -> None:
        """Examine the file without reading it.

        Args:
            path: The file.
            shown: The address in messages if the file is a copy of a remote one.
            note: Remark on the file for the report of a load, as a clause.
            trailer_bytes: Bytes at its end that are not part of the source.

        Raises:
            CheckpointError: It does not exist, is empty, or is not a regular file.
            ReadError: It cannot be examined.
        """
        #: Path in messages.
        self.path = shown or os.fspath(path)
        self.note, self._trailer_bytes = note, trailer_bytes
        self._key = object()
        self._lock = threading.Lock()
        try:
            #: Path in the file system, also after the process has changed its directory.
            here = "" if os.path.isabs(path) else os.getcwd()
            self.local_path = os.path.join(here if here and os.access(here, os.X_OK) else "", path)
            status = os.stat(self.local_path)
        except FileNotFoundError as error:
            raise MissingFileError("the file does not exist", file=self.path) from error
        except ValueError as error:
            raise CheckpointError(f"not a valid path: {error}", file=self.path) from error
        except OSError as error:
            raise read_error("the file cannot be examined", error, file=self.path) from error
        if stat.S_ISDIR(status.st_mode):
            problem = "this is a directory, not a checkpoint file"
            raise UnsupportedError(problem, file=self.path, advice="Pass the path of a file.")
        if not stat.S_ISREG(status.st_mode):
            problem = f"this is {kind_of_file(status.st_mode)}, not a regular file"
            advice = "Checkpoints are read at any offset: write the data to a file and pass its path."
            refusal = UnsupportedError(problem, file=self.path, advice=advice)
            refusal.foreign = True
            raise refusal
        self.identity, self.access = self._identified(status), local_access()
        if status.st_size == 0:
            raise TruncatedError("the file is empty", file=self.path)

    def _identified(self, status: os.stat_result) -> FileIdentity:
        return FileIdentity(
            device=status.st_dev,
            inode=status.st_ino,
            nbytes=status.st_size - self._trailer_bytes,
            mtime_ns=status.st_mtime_ns,
            ctime_ns=status.st_ctime_ns,
        )

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        if offset < 0:
            raise too_early(self.path, offset, len(buffer), 0)
        left = self.identity.nbytes - offset
        if left <= 0 or not buffer:  # the system refuses offsets of 64 bits
            return 0
        opened = self._opened(direct=direct)
        try:
            found = self._read_all(opened.fileno(), offset, buffer if direct else buffer[:left], direct=direct)
            return min(left, found)
        finally:
            del opened  # a traceback keeps the frame

    def _read_all(self, descriptor: int, offset: int, buffer: memoryview, *, direct: bool) -> int:
        done = 0
        while done < len(buffer):
            try:
                found = self._read_some(descriptor, buffer[done:], offset + done)
            except OSError as error:
                if direct and error.errno in _REFUSED_DIRECT:
                    raise DirectIOUnavailable(self.local_path) from error
                raise read_error("reading failed", error, file=self.path, offset=offset + done) from error
            if found == 0:
                break
            done += found
            if direct and done % BLOCK_BYTES:
                # Only the last block of a file may read short: a retry elsewhere would start inside a block.
                if offset + done < self.identity.nbytes:
                    raise DirectIOUnavailable(self.local_path)
                break
        return done

    def _read_some(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        for pause in _PAUSES_SECONDS:
            try:
                if not _HAS_PREADV:
                    return self._read_at_position(descriptor, buffer, offset)
                return os.preadv(descriptor, [buffer], offset)
            except (BlockingIOError, InterruptedError):
                if pause is None:
                    raise
                time.sleep(pause)
        raise AssertionError  # the last pause is None

    def _read_at_position(self, descriptor: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            os.lseek(descriptor, offset, os.SEEK_SET)
            data = os.read(descriptor, len(buffer))
        buffer[: len(data)] = data
        return len(data)

    @contextmanager
    def lend(self, *, direct: bool = False) -> Iterator[int]:
        """Lend an open descriptor for the block; opening it compares the identity of the file.

        Raises:
            DirectIOUnavailable: ``direct`` is set and the platform or file system does not support it.
            ReadError: The file cannot be opened.
            SourceChangedError: The path now names a different file.
        """
        opened = self._opened(direct=direct)
        try:
            yield opened.fileno()
        finally:
            del opened  # as above

    def _opened(self, *, direct: bool) -> OwnedFile:
        try:
            return DESCRIPTORS.take((self._key, direct), partial(self._open, direct=direct))
        except OSError as error:
            raise read_error("the file cannot be opened", error, file=self.path) from error

    def _open(self, *, direct: bool) -> OwnedFile:
        if direct and not hasattr(os, "O_DIRECT"):
            raise DirectIOUnavailable(self.local_path)
        try:
            opened = OwnedFile.open(self.local_path, os.O_DIRECT if direct else 0)
        except OSError as error:
            if direct and error.errno in _REFUSED_DIRECT:
                raise DirectIOUnavailable(self.local_path) from error
            raise
        try:
            self._compare(os.fstat(opened.fileno()))
        except SourceChangedError:
            opened.close()  # a traceback keeps the frame
            raise
        return opened

    def map(self, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
        with self.lend() as descriptor:
            self._compare(os.fstat(descriptor))
            try:
                return map_privately(descriptor, offset, nbytes)
            except OSError as error:
                problem = f"the system refused to map {nbytes} bytes"
                if error.errno == errno.ENOMEM:
                    raise BudgetError(
                        f"{problem}: {error.strerror} (a limit of the process, as of ulimit -v, or of mappings, or "
                        "vm.overcommit_memory=2)",
                        file=self.path,
                        offset=offset,
                    ) from error
                raise read_error(problem, error, file=self.path, offset=offset) from error

    def watch(self, part: int = 0) -> FileWatch | None:
        return FileWatch.open(self.local_path, part)

    def forget(self, offset: int, nbytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            with self.lend() as descriptor, suppress(OSError):
                os.posix_fadvise(descriptor, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def check_unchanged(self) -> None:
        try:
            status = os.stat(self.local_path)
        except OSError as error:
            raise SourceChangedError(f"the file is no longer accessible: {error.strerror}", file=self.path) from error
        self._compare(status)

    def close(self) -> None:
        for direct in (False, True):
            DESCRIPTORS.drop((self._key, direct))

    def __del__(self, ending: Callable[[], bool] = sys.is_finalizing) -> None:
        # A checkpoint that was never closed, or whose ``with`` block an interrupt prevented. At the end of the process
        # the system closes files, and globals, unlike defaults, may be None already.
        if not ending():
            for direct in (False, True):
                DESCRIPTORS.drop((self._key, direct))

    def _compare(self, status: os.stat_result) -> None:
        found = self._identified(status)
        if found != self.identity:
            was, now = self.identity.describe(), found.describe()
            raise SourceChangedError("the file changed since it was indexed", file=self.path, expected=was, found=now)


def kind_of_file(mode: int) -> str:
    """Return the kind of a file from its mode, for messages."""
    kinds = {
        stat.S_IFREG: "a file",
        stat.S_IFDIR: "a directory",
        stat.S_IFLNK: "a circular symbolic link",
        stat.S_IFIFO: "a FIFO",
        stat.S_IFSOCK: "a socket",
        stat.S_IFCHR: "a character device",
        stat.S_IFBLK: "a block device",
    }
    return kinds.get(stat.S_IFMT(mode), "a special file")
