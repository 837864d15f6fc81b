"""Sources in memory, and sources that record their reads and can fail one of them."""

from __future__ import annotations

import errno
import io
import itertools
import mmap
import os
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

    Args:
        source: The source, of an open checkpoint or a file; see ``record_reads``.
        fails_at: Number of the read that fails, as of a broken disk, counted from 1 over all threads; 0 for none.

    Attributes:
        reads: The reads so far. Thread-safe.
    """

    def __init__(self, source: Source, *, fails_at: int = 0) -> None:
        super().__init__(source)
        self.reads: list[RecordedRead] = []
        self._numbers = itertools.count(1)
        self._fails_at = fails_at

    def map(self, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
        if not isinstance(self._source, MappableSource):
            raise ReadError("this source cannot be mapped", file=self.path, offset=offset)
        return self._source.map(offset, nbytes)

    @property
    def read_bytes(self) -> int:
        """Requested bytes so far."""
        return sum(read.nbytes for read in self.reads)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self._record(RecordedRead(offset=offset, nbytes=nbytes))
        return self._source.read_at(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        self._record(RecordedRead(offset=offset, nbytes=len(buffer), direct=direct))
        return self._source.read_into(offset, buffer, direct=direct)

    def _record(self, read: RecordedRead) -> None:
        self.reads.append(read)
        if next(self._numbers) == self._fails_at:
            cause = OSError(errno.EIO, os.strerror(errno.EIO))
            raise ReadError(f"reading failed: {cause.strerror}", file=self.path, offset=read.offset) from cause


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
