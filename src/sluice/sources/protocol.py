"""Where bytes live: one file for each kind of source behind one small protocol."""

from __future__ import annotations

import mmap
from typing import Protocol, runtime_checkable

from sluice.records import AccessFacts, FileIdentity

__all__ = ["DirectIOUnavailable", "MappableSource", "Source"]


class DirectIOUnavailable(Exception):  # noqa: N818  (a signal between layers, never seen by users)
    """The file system refuses direct I/O for this file; the caller steps down to buffered reads."""


class Source(Protocol):
    """One object of bytes that can be read at any offset, from any thread.

    Implementations raise ``ReadError`` for what the operating system or a server fails, with the offset and ``from``
    what they met, and ``SourceChangedError`` when the identity is no longer that of the first look. Nothing is
    allocated for a range that the source does not have. ``sluice.testing.check_source`` checks all that is said here.
    """

    @property
    def path(self) -> str:
        """Path or address as the user would type it, without credentials."""
        ...

    @property
    def identity(self) -> FileIdentity:
        """Size and identity when the source was opened."""
        ...

    @property
    def access(self) -> AccessFacts:
        """Request size, coalescing gap and parallelism that suit the source."""
        ...

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return exactly ``nbytes`` bytes from ``offset``.

        Raises:
            TruncatedError: The source ends before ``offset + nbytes``, or one of the two is negative.
        """
        ...

    def read_into(self, offset: int, buffer: memoryview, *, direct: bool = False) -> int:
        """Fill ``buffer`` from ``offset``, retrying short reads; return the bytes read, fewer only at the end.

        From the end on that is 0. The buffer is not kept: its owner may free it when this returns.

        With ``direct``, offset, address and length are multiples of 4096 and the page cache is bypassed; raises
        ``DirectIOUnavailable`` where the source has no such way.

        Raises:
            TruncatedError: ``offset`` is negative.
        """
        ...

    def forget(self, offset: int, nbytes: int) -> None:
        """Drop the range from whatever cache a buffered read left it in; a hint that may do nothing."""
        ...

    def check_unchanged(self) -> None:
        """Raise ``SourceChangedError`` when the source is no longer the one that was opened."""
        ...

    def close(self) -> None:
        """Release descriptors or connections; reading again reopens them, if the identity is still the same."""
        ...


@runtime_checkable
class MappableSource(Source, Protocol):
    """A source whose bytes can be pages of this process; only those of files on this machine can."""

    def map(self, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
        """Return a private, writable mapping of a range and where the range begins in it; nothing is read.

        Raises:
            BudgetError: The system refuses the address space.
            ReadError: It cannot map this source.
            SourceChangedError: It is no longer the source that was opened.
        """
        ...
