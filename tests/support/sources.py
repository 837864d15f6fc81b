"""Sources in memory, and sources that record their reads or fail one of them."""

from __future__ import annotations

import errno
import io
import mmap
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sluice._errors import ReadError
from sluice.records import FileIdentity
from sluice.sources.protocol import MappableSource, Source
from sluice.sources.ranges import MemoryFile
from sluice.sources.wrappers import ForwardingSource

if TYPE_CHECKING:
    from sluice.api.checkpoint import Checkpoint


class MemorySource(MemoryFile):
    """Bytes as a source, for tests that open thousands of small files; see ``Source``.

    Args:
        content: The bytes, which may be none.
        path: Path in messages.
    """

    def __init__(self, content: bytes, *, path: str = "memory") -> None:
        self.path = path
        self.identity = FileIdentity(nbytes=len(content))
        self._stream = io.BytesIO(content)

    def check_unchanged(self) -> None:
        """Do nothing: bytes do not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRead:
    """One requested read of a source."""

    #: First byte.
    offset: int
    #: Requested bytes.
    nbytes: int
    #: Whether direct I/O was requested.
    direct: bool = False


class RecordingSource(ForwardingSource):
    """A source that records its reads, in the order in which they begin.

    Attributes:
        reads: The reads so far. Thread-safe.

    See ``record_reads``, which makes them.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.reads: list[RecordedRead] = []

    def map(self, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
        if not isinstance(self._source, MappableSource):
            raise ReadError("this source cannot be mapped", file=self.path, offset=offset)
        return self._source.map(offset, nbytes)

    @property
    def read_bytes(self) -> int:
        """Requested bytes so far."""
        return sum(read.nbytes for read in self.reads)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.reads.append(RecordedRead(offset=offset, nbytes=nbytes))
        return self._source.read_at(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        self.reads.append(RecordedRead(offset=offset, nbytes=len(buffer), direct=direct))
        return self._source.read_into(offset, buffer, direct=direct)


def record_reads(checkpoint: Checkpoint) -> tuple[RecordingSource, ...]:
    """Record the reads of an open checkpoint from now on.

    Returns:
        A recording source for each of ``checkpoint.files``. No machine facts are collected for them, so that every read
        is buffered and has exactly the planned range.
    """
    files = checkpoint.open_files
    recordings = tuple(RecordingSource(file.source) for file in files)
    checkpoint.open_files = tuple(
        replace(file, source=recording) for file, recording in zip(files, recordings, strict=True)
    )
    return recordings


class FaultySource(RecordingSource):
    """A source whose ``at``-th read fails, counted from 1 over all threads, as of a broken disk.

    Attributes:
        failed: Whether the read has failed; tests should assert that it is True at the end.
    """

    def __init__(self, source: Source, *, at: int) -> None:
        super().__init__(source)
        self._at = at
        self._lock = threading.Lock()
        self.failed = False

    def read_at(self, offset: int, nbytes: int) -> bytes:
        with self._lock:
            found = super().read_at(offset, nbytes)
            self._fail_if_due(offset)
        return found

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        with self._lock:
            found = super().read_into(offset, buffer, direct=direct)
            self._fail_if_due(offset)
        return found

    def _fail_if_due(self, offset: int) -> None:
        if len(self.reads) == self._at:
            self.failed = True
            cause = OSError(errno.EIO, os.strerror(errno.EIO))
            raise ReadError(f"reading failed: {cause.strerror}", file=self.path, offset=offset) from cause
