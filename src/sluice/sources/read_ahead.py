"""Read-ahead for headers: small reads are extended to pieces, which serve the reads that follow.

A zip file is indexed by a dozen reads of a few bytes each, at its beginning and at its end. Over a thousand shards the
latency of separate reads would take far longer than reading the bytes.
"""

from __future__ import annotations

from sluice.sources.protocol import Source

__all__ = ["ReadAhead"]

#: Number of pieces kept: the beginning of a file, its end, and the ends of a pickle or a storage between them.
_PIECES_KEPT = 4


class ReadAhead:
    """A source that keeps the last few pieces of the wrapped source while it is indexed; see ``Source``."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.path, self.identity, self.access = source.path, source.identity, source.access
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

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        return self._source.read_into(offset, buffer, direct=direct)

    def forget(self, offset: int, nbytes: int) -> None:
        self._pieces = ()
        self._source.forget(offset, nbytes)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        self._pieces = ()
        self._source.close()
