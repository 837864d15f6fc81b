"""The content of an ``io.BytesIO`` as a source."""

from __future__ import annotations

import io

from sluice._errors import SourceChangedError, TruncatedError
from sluice.records import AccessFacts, FileIdentity, local_access
from sluice.sources.protocol import DirectIOUnavailable
from sluice.sources.short_reads import too_early

__all__ = ["MemoryFile"]


class MemoryFile:
    """The content of a ``BytesIO``, which is not copied; see ``Source``."""

    def __init__(self, stream: io.BytesIO) -> None:
        """Keep the stream; its position is ignored and does not change."""
        self.path = "<memory>"
        self._stream = stream
        self.identity = FileIdentity(nbytes=self._nbytes())
        if not self.identity.nbytes:
            raise TruncatedError("the file is empty", file=self.path)

    @property
    def access(self) -> AccessFacts:
        return local_access()

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or not 0 <= nbytes <= self.identity.nbytes - offset:
            raise too_early(self.path, offset, nbytes, self.identity.nbytes - offset)
        self.check_unchanged()
        with self._stream.getbuffer() as content:
            return bytes(content[offset : offset + nbytes])

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        if direct:
            raise DirectIOUnavailable(self.path)
        if offset < 0:
            raise too_early(self.path, offset, len(buffer), 0)
        self.check_unchanged()
        # The view must end with this call: a stream with an open view cannot be written to.
        with self._stream.getbuffer() as content:
            found = content[offset : offset + len(buffer)]
            buffer[: len(found)] = found
            return len(found)

    def forget(self, offset: int, nbytes: int) -> None:
        """Do nothing: no bytes are cached."""

    def check_unchanged(self) -> None:
        found = FileIdentity(nbytes=self._nbytes())
        if found != self.identity:
            raise SourceChangedError(
                "the stream changed",
                file=self.path,
                expected=self.identity.describe(),
                found=found.describe(),
            )

    def close(self) -> None:
        """Do nothing: the caller owns the stream."""

    def _nbytes(self) -> int:
        with self._stream.getbuffer() as content:
            return content.nbytes
