"""Sources for tests: one that records what is read, one that fails on purpose. Both wrap any other source."""

from __future__ import annotations

import mmap
import os
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from sluice._errors import ReadError, TruncatedError
from sluice.records import AccessFacts, FileIdentity
from sluice.sources.protocol import MappableSource, Source

if TYPE_CHECKING:
    from sluice.api.checkpoint import Checkpoint

__all__ = ["FaultySource", "RecordedRead", "RecordingSource", "record_reads"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRead:
    """One read that was asked of a source."""

    #: First byte.
    offset: int
    #: Bytes asked for.
    nbytes: int
    #: Whether it was to bypass the page cache.
    direct: bool = False


class _WrappedSource:
    """Passes on to another source whatever is not a read."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def path(self) -> str:
        return self._source.path

    @property
    def identity(self) -> FileIdentity:
        return self._source.identity

    @property
    def access(self) -> AccessFacts:
        return self._source.access

    def map(self, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
        if not isinstance(self._source, MappableSource):
            raise ReadError("this source cannot be mapped", file=self.path, offset=offset)
        return self._source.map(offset, nbytes)

    def forget(self, offset: int, nbytes: int) -> None:
        self._source.forget(offset, nbytes)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()


class RecordingSource(_WrappedSource):
    """A source that keeps a list of its reads, in the order in which they began.

    Attributes:
        reads: What was read so far; safe to look at while other threads read.

    Example:
        >>> with closing(RecordingSource(LocalFile("model.safetensors"))) as source:
        ...     index = Safetensors().read_index(source, Limits())
        >>> source.reads[0]
        RecordedRead(offset=0, nbytes=8, direct=False)
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self.reads: list[RecordedRead] = []

    @property
    def read_bytes(self) -> int:
        """Bytes asked for so far."""
        return sum(read.nbytes for read in self.reads)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        self.reads.append(RecordedRead(offset=offset, nbytes=nbytes))
        return self._source.read_at(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        self.reads.append(RecordedRead(offset=offset, nbytes=len(buffer), direct=direct))
        return self._source.read_into(offset, buffer, direct=direct)


def record_reads(checkpoint: Checkpoint) -> tuple[RecordingSource, ...]:
    """Record what is read of an open checkpoint from now on.

    Returns:
        A recording source for each of ``checkpoint.files``. The machine is not asked about them, so that every read is
        a buffered one of exactly the bytes that were planned.

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


class FaultySource(_WrappedSource):
    """A source whose ``at``-th read goes wrong, counted from 1 over all threads.

    Args:
        source: The source that is read otherwise.
        at: Which read goes wrong.
        error: Number of the operating system's error, as ``errno.EIO``; it becomes a ``ReadError``.
            None: the read ends early instead, as if the file had been cut.
        found_bytes: Without ``error``: bytes that the read still gets.

    Attributes:
        failed: Whether it has gone wrong already; a test that never sees True has tested nothing.

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
        raise TruncatedError(
            "the file ends too early",
            file=self.path,
            offset=offset,
            expected=f"{nbytes} bytes",
            found=f"{min(nbytes, self._found_bytes)} bytes",
        )

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        if not self._is_due(offset):
            return self._source.read_into(offset, buffer, direct=direct)
        found = self._source.read_into(offset, buffer, direct=direct)
        return min(found, self._found_bytes)

    def _is_due(self, offset: int) -> bool:
        """Count a read; return whether it ends early, or raise the error that it meets."""
        with self._lock:
            self._count += 1
            if self._count != self._at:
                return False
            self.failed = True
        if self._error is None:
            return True
        problem = f"reading failed: {os.strerror(self._error)}"
        raise ReadError(problem, file=self.path, offset=offset) from OSError(self._error, os.strerror(self._error))
