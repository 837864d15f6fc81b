"""The reads of an open checkpoint, recorded."""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from msgspec.structs import replace

from sluice._errors import ReadError
from sluice.api.checkpoint import Checkpoint
from sluice.sources.protocol import MappableSource, Source
from sluice.sources.wrappers import ForwardingSource


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
