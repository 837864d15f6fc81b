"""The protocol of sources, which every kind of source implements in a module of its own."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeGuard, runtime_checkable

from sluice.records import AccessFacts, FileIdentity
from sluice.sources.pages import FileWatch

__all__ = [
    "CachingSource",
    "CheckingSource",
    "DirectIOUnavailable",
    "JoiningSource",
    "MappableSource",
    "Source",
    "WatchableSource",
    "checks_with_data",
    "is_caching",
    "joins_reads",
]


class DirectIOUnavailable(Exception):  # noqa: N818  (a signal between layers, never seen by users)
    """The file system refuses direct I/O for this file; the caller steps down to buffered reads."""


class Source(Protocol):
    """One object of bytes that can be read at any offset, from any thread.

    Implementations raise ``ReadError`` for failures of the operating system or a server, with the offset and from the
    original exception, and ``SourceChangedError`` if the identity differs from that of the opened source. They allocate
    nothing for a range outside the source.
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
        """Fill ``buffer`` from ``offset``, retrying short reads; return the number of bytes read.

        It is less than the size of the buffer only at the end of the source, and 0 from the end on. The buffer is not
        kept: its owner may free it when this returns.

        With ``direct``, offset, address and length are multiples of 4096 and the page cache is bypassed; raises
        ``DirectIOUnavailable`` if the source does not support that.

        Raises:
            TruncatedError: ``offset`` is negative.
        """
        ...

    def forget(self, offset: int, nbytes: int) -> None:
        """Drop the range from the cache that buffered reads filled; a hint, which may do nothing."""
        ...

    def check_unchanged(self) -> None:
        """Raise ``SourceChangedError`` if the source differs from the one that was opened."""
        ...

    def close(self) -> None:
        """Release descriptors or connections; a later read reopens them if the identity is unchanged."""
        ...


@runtime_checkable
class WatchableSource(Source, Protocol):
    """A source that several processes may read through one page cache: a file on this machine."""

    def watch(self, part: int = 0) -> FileWatch | None:
        """Mark a part of the file as being read, until the watch is closed; None if it cannot be opened."""
        ...


class CheckingSource(Source, Protocol):
    """A source each of whose requests is expensive: headers in front of data are read and checked together with it."""

    def expect(self, offset: int, nbytes: int, data_bytes: int, check: Callable[[bytes], None]) -> None:
        """Have a range checked before the data after it counts as read.

        A read of the first of the data begins at ``offset``, and fails if the check raises. If other parts of the data
        were read, ``check_unchanged`` reads and checks the range.

        Args:
            offset: First byte of the range.
            nbytes: Its size.
            data_bytes: Bytes of data after it. Ranges and their data do not overlap.
            check: Called with the range, from any thread; raises if it is not as expected.
        """
        ...


def checks_with_data(source: Source) -> TypeGuard[CheckingSource]:
    """Return whether a source is a ``CheckingSource``."""
    return hasattr(source, "expect")  # a comparison with the protocol takes 20 times as long


class JoiningSource(Source, Protocol):
    """A source each of whose requests is expensive: reads that follow each other share one."""

    def request(self, offset: int, nbytes: int) -> AbstractContextManager[Source]:
        """Return this source for the reads of a range by one thread, in order; bytes between them are skipped."""
        ...


def joins_reads(source: Source) -> TypeGuard[JoiningSource]:
    """Return whether a source is a ``JoiningSource``."""
    return hasattr(source, "request")


class CachingSource(Source, Protocol):
    """A source that can be downloaded as a whole, so that reads need no more requests."""

    def fill(self, report: Callable[[int], object]) -> None:
        """Download what is missing; call ``report`` with the number of further bytes that are here, or 0, meanwhile.

        Raises:
            SluiceError: The server failed.
        """
        ...


def is_caching(source: Source) -> TypeGuard[CachingSource]:
    """Return whether a source is a ``CachingSource``."""
    return hasattr(source, "fill")


@runtime_checkable
class MappableSource(Source, Protocol):
    """A source that can be mapped into memory: a file on this machine."""

    def map(self, offset: int, nbytes: int) -> tuple[mmap.mmap, int]:
        """Return a private, writable mapping of a range, and the offset of the range in it; nothing is read.

        Raises:
            BudgetError: The system refuses the address space.
            ReadError: The system cannot map this source.
            SourceChangedError: The source differs from the one that was opened.
        """
        ...
