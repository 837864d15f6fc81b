"""What every format offers to the layers above it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from sluice._options import Limits
from sluice._records import Index
from sluice.sources import Source

__all__ = ["Format", "Locator"]


class Locator(Protocol):
    """Finds the data of storages of one source."""

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
