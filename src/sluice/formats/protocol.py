"""What every format offers to the layers above it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from sluice._errors import CheckpointError
from sluice._options import Limits
from sluice.records import Index
from sluice.sources.protocol import Source

__all__ = ["Checksum", "Format", "Locator"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Checksum:
    """A CRC-32 that a file records of a range of its bytes."""

    #: Name of the range in the file: that of the record.
    name: str
    #: First byte in the source.
    offset: int
    #: Bytes of the range.
    nbytes: int
    #: What the file says; 0 where its writer did not compute any.
    crc: int


class Locator(Protocol):
    """Finds the data of storages of one source."""

    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
        """Return the checksums of a source that was indexed; for a damaged header, what is wrong with it instead."""
        ...

    def locate(self, source: Source, index: Index, storages: Iterable[int]) -> Mapping[int, int]:
        """Return the data offset of those of ``storages`` that the index has not located.

        Raises:
            FormatError: What lies at the offset contradicts the index.
        """
        ...


class Format(Locator, Protocol):
    """The meaning of a source's bytes: headers only, never tensor data."""

    #: Name for people and reports: ``"torch-zip"``.
    name: str

    def matches(self, head: bytes) -> bool:
        """Return whether a file that starts with ``head`` (its first bytes, up to 4096) claims this format."""
        ...

    def read_index(self, source: Source, limits: Limits) -> Index:
        """Return the index of the source.

        Raises:
            CheckpointError: The bytes are not what the format allows; the subclass says how.
        """
        ...
