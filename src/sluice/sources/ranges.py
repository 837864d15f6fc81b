"""Sources whose reads are held against their size: base classes, and the content of an ``io.BytesIO``."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, ClassVar

from msgspec.structs import replace

from sluice._errors import SourceChangedError, TruncatedError
from sluice.records import AccessFacts, FileIdentity, FileRecord, local_access
from sluice.sources.protocol import DirectIOUnavailable, Source

if TYPE_CHECKING:
    from sluice.checkpoint.open_checkpoint import OpenCheckpoint

__all__ = ["ComputedSource", "MemoryFile", "RangedSource", "ended_early", "too_early"]


def too_early(
    file: str, offset: int, nbytes: int, found: int, problem: str = "the file ends too early"
) -> TruncatedError:
    """Return the error for a read that the file cannot satisfy.

    Args:
        file: Path or address of the file.
        offset: First byte of the read.
        nbytes: Bytes of the read.
        found: Bytes of it that are inside the file; negative numbers count as 0.
        problem: What is wrong, as one clause.
    """
    expected, inside = f"{nbytes} bytes", f"{max(0, found)} bytes"
    return TruncatedError(problem, file=file, offset=offset, expected=expected, found=inside)


def ended_early(source: Source | RangedSource, offset: int, nbytes: int, found: int) -> TruncatedError:
    """Return the error for a read that found fewer bytes than the source had; raise if the source has changed."""
    source.check_unchanged()
    return too_early(source.path, offset, nbytes, found)


class RangedSource:
    """See ``Source``; subclasses set ``path`` and ``identity``, and fill buffers with ranges inside of the source."""

    path: str
    identity: FileIdentity

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """See ``Source``."""
        left = self.identity.nbytes - offset
        if offset < 0 or not 0 <= nbytes <= left:
            raise too_early(self.path, offset, nbytes, left)
        data = bytearray(nbytes)
        found = self.read_into(offset, memoryview(data))
        if found != nbytes:
            raise ended_early(self, offset, nbytes, found)
        return bytes(data)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        """See ``Source``: there are no direct reads."""
        if direct:
            raise DirectIOUnavailable(self.path)
        if offset < 0:
            raise too_early(self.path, offset, len(buffer), 0)
        nbytes = max(0, min(len(buffer), self.identity.nbytes - offset))
        if nbytes:
            self.fill_buffer(offset, buffer[:nbytes])
        return nbytes

    def fill_buffer(self, offset: int, buffer: memoryview) -> None:
        """Fill a buffer, which is not empty, with the bytes from ``offset`` on."""
        raise NotImplementedError

    def check_unchanged(self) -> None:
        """See ``Source``."""

    def forget(self, offset: int, nbytes: int) -> None:
        """Do nothing: no bytes are cached."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


class ComputedSource(RangedSource):
    """See ``Source``; subclasses compute the bytes of buffers."""

    #: Ranges that are computed at once.
    at_once: ClassVar[int] = 1
    #: Host memory of the computation, in bytes.
    working_bytes: int = 0
    #: Files of which alone its bytes follow; empty if they depend on more.
    origins: tuple[FileRecord, ...] = ()

    def __init__(self, path: str, inputs: OpenCheckpoint, nbytes: int) -> None:
        """Compute nothing yet; ``path`` is a name for messages."""
        self.path, self.inputs = path, inputs
        self.identity = FileIdentity(nbytes=nbytes)

    @property
    def access(self) -> AccessFacts:
        """See ``Source``: each thread keeps freed memory of what it has computed, so that they are few."""
        return replace(local_access(), parallel_requests=self.at_once)

    def check_unchanged(self) -> None:
        """See ``Source``: of all inputs."""
        for source in self.inputs.sources:
            source.check_unchanged()


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
