"""A range of a source as a source: a file inside a file is parsed like a file."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from sluice._errors import TruncatedError
from sluice.records import FileIdentity
from sluice.sources.forwarding import ForwardingSource
from sluice.sources.protocol import Source
from sluice.sources.ranges import too_early

__all__ = ["Section"]


class Section(ForwardingSource):
    """Bytes ``start`` to ``start + nbytes`` of a source, counted from 0; see ``Source``.

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
        self._identity = replace(source.identity, nbytes=nbytes)
        self._known = tuple(known)

    @property
    def identity(self) -> FileIdentity:
        return self._identity

    def read_at(self, offset: int, nbytes: int) -> bytes:
        if offset < 0 or nbytes < 0 or offset + nbytes > self._identity.nbytes:
            raise self._too_early(offset, nbytes)
        for first, data in self._known:
            if first <= offset and offset + nbytes <= first + len(data):
                return data[offset - first : offset - first + nbytes]
        return self._source.read_at(self.start + offset, nbytes)

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        if offset < 0:
            raise self._too_early(offset, len(buffer))
        room = max(0, self._identity.nbytes - offset)
        return self._source.read_into(self.start + offset, buffer[:room], direct=direct)

    def forget(self, offset: int, nbytes: int) -> None:
        self._source.forget(self.start + offset, nbytes)

    def close(self) -> None:
        """Do nothing: the section does not own the source."""

    def _too_early(self, offset: int, nbytes: int) -> TruncatedError:
        problem = "a file inside this file ends too early"
        return too_early(self.path, offset, nbytes, self._identity.nbytes - offset, problem)
