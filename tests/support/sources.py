"""Sources in memory, and sources that fail a read."""

from __future__ import annotations

import io
import mmap
import os
import threading

from sluice._errors import ReadError
from sluice.records import FileIdentity
from sluice.sources.protocol import MappableSource, Source
from sluice.sources.ranges import MemoryFile, too_early
from sluice.sources.wrappers import ForwardingSource


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


class FaultySource(ForwardingSource):
    """A source whose ``at``-th read fails, counted from 1 over all threads.

    Args:
        source: The source of all other reads.
        at: Number of the failing read.
        error: Error number of the operating system, such as ``errno.EIO``, which is raised as ``ReadError``. None: the
            read is short instead, as if the file had been truncated.
        found_bytes: Without ``error``: bytes that the short read returns.

    Attributes:
        failed: Whether the read has failed; tests should assert that it is True at the end.
    """

    def __init__(self, source: Source, *, at: int, error: int | None = None, found_bytes: int = 0) -> None:
        super().__init__(source)
        self._at = at
        self._error = error
        self._found_bytes = found_bytes
        self._count = 0
        self._lock = threading.Lock()
        self.failed = False

    def map(self, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
        if not isinstance(self._source, MappableSource):
            raise ReadError("this source cannot be mapped", file=self.path, offset=offset)
        return self._source.map(offset, nbytes)

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
