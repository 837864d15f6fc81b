"""Base classes of sources, and sources that wrap a source: a range of it, the pieces of it that were read last."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from sluice._errors import TruncatedError
from sluice.records import FileIdentity
from sluice.sources.protocol import DirectIOUnavailable, Source

__all__ = ["ForwardingSource", "RangedSource", "ReadAhead", "Section", "ended_early", "too_early"]

#: Number of pieces kept: the beginning of a file, its end, and the ends of a pickle or a storage between them.
_PIECES_KEPT = 4

_INSIDE = "a file inside this file ends too early"


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


class ForwardingSource:
    """Forwards everything to the wrapped source; see ``Source``."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.path, self.identity, self.access = source.path, source.identity, source.access

    def read_at(self, offset: int, nbytes: int) -> bytes:
        return self._source.read_at(offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        return self._source.read_into(offset, buffer, direct=direct)

    def forget(self, offset: int, nbytes: int) -> None:
        self._source.forget(offset, nbytes)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._source.close()


class Section(ForwardingSource):
    """Bytes ``start`` to ``start + nbytes`` of a source, counted from 0: a file inside a file is parsed like a file.

    Offsets in errors of a parser count from the start of the section: its caller adds ``start``.
    """

    def __init__(self, source: Source, start: int, nbytes: int, *, known: Iterable[tuple[int, bytes]] = ()) -> None:
        """Set the range.

        Args:
            source: The source that contains it.
            start: Its first byte in the source.
            nbytes: Its size; the range must lie inside the source.
            known: Bytes that were read before, with their offset in the section: they are not read again.
        """
        super().__init__(source)
        self.start = start
        self.identity = replace(source.identity, nbytes=nbytes)
        self._known = tuple(known)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self.identity.nbytes:
            raise too_early(self.path, offset, nbytes, self.identity.nbytes - offset, _INSIDE)
        for first, data in self._known:
            if first <= offset and offset + nbytes <= first + len(data):
                return data[offset - first : offset - first + nbytes]
        return self._source.read_at(self.start + offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        if offset < 0:
            raise too_early(self.path, offset, len(buffer), self.identity.nbytes - offset, _INSIDE)
        room = max(0, self.identity.nbytes - offset)
        return self._source.read_into(self.start + offset, buffer[:room], direct=direct)

    def forget(self, offset: int, nbytes: int) -> None:
        self._source.forget(self.start + offset, nbytes)

    def close(self) -> None:
        """Do nothing: the section does not own the source."""


class ReadAhead(ForwardingSource):
    """Keeps the last few pieces of a source while it is indexed: small reads are extended to pieces.

    A zip file is indexed by a dozen reads of a few bytes each, at its beginning and at its end. Over a thousand shards
    the latency of separate reads would take far longer than reading the bytes.
    """

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        if hasattr(source, "expect"):  # it checks headers together with the data after them
            self.expect = source.expect
        #: Offset and bytes of each piece. Replaced as a whole, so that any thread may read it.
        self._pieces: tuple[tuple[int, bytes], ...] = ()

    def read_at(self, offset: int, nbytes: int) -> bytes:
        size, piece_bytes, first_bytes = self.identity.nbytes, self.access.header_bytes, self.access.first_bytes
        if offset < 0 or not 0 <= nbytes < piece_bytes or offset + nbytes > size:
            return self._source.read_at(offset, nbytes)
        for start, data in self._pieces:
            if start <= offset and offset + nbytes <= start + len(data):
                return data[offset - start : offset - start + nbytes]
        if offset + nbytes <= max(first_bytes, piece_bytes):
            # The first bytes are at hand, so that the rest of the first piece is one request.
            start, end = 0, first_bytes if offset + nbytes <= first_bytes else piece_bytes
        else:
            start = max(0, min(offset, size - piece_bytes))
            end = start + piece_bytes
        data = self._source.read_at(start, min(end, size) - start)
        self._pieces = (*self._pieces[1 - _PIECES_KEPT :], (start, data))
        return data[offset - start : offset - start + nbytes]

    def forget(self, offset: int, nbytes: int) -> None:
        self._pieces = ()
        super().forget(offset, nbytes)

    def close(self) -> None:
        self._pieces = ()
        super().close()
