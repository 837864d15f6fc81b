"""Sources for tests: one is in memory, one records its reads, one fails a read."""

from __future__ import annotations

import io
import mmap
import os
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from sluice._errors import ReadError
from sluice._public import public
from sluice.records import FileIdentity
from sluice.sources.forwarding import ForwardingSource
from sluice.sources.memory import MemoryFile
from sluice.sources.protocol import MappableSource, Source
from sluice.sources.short_reads import too_early

if TYPE_CHECKING:
    from sluice.api.checkpoint import Checkpoint

__all__ = ["FaultySource", "MemorySource", "RecordedRead", "RecordingSource", "record_reads"]


@public("sluice.testing")
class MemorySource(MemoryFile):
    """Bytes as a source, for tests that open thousands of small files; see ``Source``.

    Args:
        content: The bytes, which may be none.
        path: Path in messages.

    Example:
        >>> MemorySource(b"0123").read_at(1, 2)
        b'12'
    """

    def __init__(self, content: bytes, *, path: str = "memory") -> None:
        self.path = path
        self.identity = FileIdentity(nbytes=len(content))
        self._stream = io.BytesIO(content)

    def check_unchanged(self) -> None:
        """Do nothing: bytes do not change."""


@public("sluice.testing")
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRead:
    """One requested read of a source."""

    #: First byte.
    offset: int
    #: Requested bytes.
    nbytes: int
    #: Whether direct I/O was requested.
    direct: bool = False


class _WrappedSource(ForwardingSource):
    """A wrapped source that can be mapped if the source can."""

    def map(self, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
        if not isinstance(self._source, MappableSource):
            raise ReadError("this source cannot be mapped", file=self.path, offset=offset)
        return self._source.map(offset, nbytes)


@public("sluice.testing")
class RecordingSource(_WrappedSource):
    """A source that records its reads, in the order in which they begin.

    Attributes:
        reads: The reads so far. Thread-safe.

    Example:
        >>> with closing(RecordingSource(LocalFile("model.safetensors"))) as source:
        ...     index = SafetensorsFormat().read_index(source, Limits())
        >>> source.reads[0]
        RecordedRead(offset=0, nbytes=8, direct=False)
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.reads: list[RecordedRead] = []

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


@public("sluice.testing")
def record_reads(checkpoint: Checkpoint) -> tuple[RecordingSource, ...]:
    """Record the reads of an open checkpoint from now on.

    Returns:
        A recording source for each of ``checkpoint.files``. No machine facts are collected for them, so that every read
        is buffered and has exactly the planned range.

    Example:
        >>> with sluice.open("model.safetensors") as checkpoint:
        ...     (recording,) = record_reads(checkpoint)
        ...     rows = checkpoint["wte.weight"][:10].read()
        ...     print(recording.read_bytes == rows.nbytes)
        True
    """
    files = checkpoint._files  # noqa: SLF001  (the seam is for tests: users of the library have no sources)
    recordings = tuple(RecordingSource(file.source) for file in files)
    checkpoint._files = tuple(  # noqa: SLF001
        replace(file, source=recording) for file, recording in zip(files, recordings, strict=True)
    )
    return recordings


@public("sluice.testing")
class FaultySource(_WrappedSource):
    """A source whose ``at``-th read fails, counted from 1 over all threads.

    Args:
        source: The source of all other reads.
        at: Number of the failing read.
        error: Error number of the operating system, such as ``errno.EIO``, which is raised as ``ReadError``. None: the
            read is short instead, as if the file had been truncated.
        found_bytes: Without ``error``: bytes that the short read returns.

    Attributes:
        failed: Whether the read has failed; tests should assert that it is True at the end.

    Example:
        >>> source = FaultySource(LocalFile("model.safetensors"), at=2, error=errno.EIO)
    """

    def __init__(self, source: Source, *, at: int, error: int | None = None, found_bytes: int = 0) -> None:
        super().__init__(source)
        self._at = at
        self._error = error
        self._found_bytes = found_bytes
        self._count = 0
        self._lock = threading.Lock()
        self.failed = False

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if not self._is_due(offset):
            return self._source.read_at(offset, nbytes)
        raise too_early(self.path, offset, nbytes, min(nbytes, self._found_bytes))

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        if not self._is_due(offset):
            return self._source.read_into(offset, buffer, direct=direct)
        nbytes = self._source.read_into(offset, buffer, direct=direct)
        return min(nbytes, self._found_bytes)

    def _is_due(self, offset: int) -> bool:
        """Count a read; return whether it is to be short, or raise the error."""
        with self._lock:
            self._count += 1
            if self._count != self._at:
                return False
            self.failed = True
        if self._error is None:
            return True
        problem = f"reading failed: {os.strerror(self._error)}"
        raise ReadError(problem, file=self.path, offset=offset) from OSError(self._error, os.strerror(self._error))
