"""The protocols of formats: reading an index, locating storages, listing checksums."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from msgspec import Struct

from sluice._errors import CheckpointError
from sluice._messages import check_limit
from sluice._options import TEXT_ENCODING, Limits
from sluice.records import Index
from sluice.sources.protocol import Source

__all__ = ["Checksum", "Format", "LocatedByIndex", "Locator", "read_whole"]


class Checksum(Struct, frozen=True, kw_only=True):
    """A CRC-32 that a file records for a range of its bytes."""

    #: Name of the record that the range belongs to.
    name: str
    #: First byte in the source.
    offset: int
    #: Bytes of the range.
    nbytes: int
    #: The recorded CRC-32; 0 if the writer did not compute it.
    crc: int


class Locator(Protocol):
    """Finds the data of storages of one source."""

    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
        """Return the checksums of an indexed source; an error takes the place of a checksum whose header is damaged."""
        ...

    def locate(self, source: Source, index: Index, storages: Iterable[int]) -> Mapping[int, int]:
        """Return the data offset of each of ``storages`` that is not located in the index.

        Raises:
            FormatError: The header at the offset contradicts the index.
        """
        ...


class Format(Locator, Protocol):
    """A file format: reads headers only, never tensor data."""

    #: Name for reports and messages: ``"torch-zip"``.
    name: str

    def read_index(self, source: Source, limits: Limits) -> Index:
        """Return the index of the source.

        Raises:
            CheckpointError: The bytes violate the format; the subclass tells how.
        """
        ...


class LocatedByIndex(Struct, kw_only=True):
    """Base class of formats whose indexes locate every storage and whose files have no checksums."""

    #: Encoding of text that Python 2 wrote, for the formats that can contain it.
    encoding: str = TEXT_ENCODING

    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:  # noqa: ARG002
        return []

    def locate(self, source: Source, index: Index, storages: Iterable[int]) -> Mapping[int, int]:  # noqa: ARG002
        return {}


def read_whole(source: Source, limits: Limits, what: str) -> bytes:
    """Return all bytes of a small file; ``what`` describes it in messages.

    Raises:
        LimitError: It has more than ``limits.header_bytes``.
    """
    nbytes = source.identity.nbytes
    check_limit(limits, "header_bytes", nbytes, what, file=source.path)
    return source.read_at(0, nbytes)
