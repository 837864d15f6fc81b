"""The content of an ``io.BytesIO`` as a source."""

from __future__ import annotations

import io

from sluice._errors import SourceChangedError, TruncatedError
from sluice.records import AccessFacts, FileIdentity, local_access
from sluice.sources.ranges import RangedSource

__all__ = ["MemoryFile"]


class MemoryFile(RangedSource):
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

    def fill_buffer(self, offset: int, buffer: memoryview) -> None:
        self.check_unchanged()
        # The view must end with this call: a stream with an open view cannot be written to.
        with self._stream.getbuffer() as content:
            buffer[:] = content[offset : offset + len(buffer)]

    def check_unchanged(self) -> None:
        found = FileIdentity(nbytes=self._nbytes())
        if found != self.identity:
            was, now = self.identity.describe(), found.describe()
            raise SourceChangedError("the stream changed", file=self.path, expected=was, found=now)

    def _nbytes(self) -> int:
        with self._stream.getbuffer() as content:
            return content.nbytes
