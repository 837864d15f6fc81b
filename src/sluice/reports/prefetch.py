"""The result of a prefetch: the files of a checkpoint, what was requested for each, and which are cached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from sluice._units import counted, format_bytes, format_rate
from sluice.reports.document import Grid, Report, Section, Strong

__all__ = ["PrefetchReport", "PrefetchedFile"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchedFile:
    """One file of a prefetch."""

    #: Its address, or its path if it is read from a local file.
    path: str
    #: Its size.
    nbytes: int
    #: Bytes that were requested; the rest was cached before.
    requested_bytes: int
    #: Requests to the server, the opening one included.
    requests: int
    #: Why it is not cached, or not as a whole, as a clause; None if all of it is local.
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchReport(Report):
    """Result of ``sluice prefetch``."""

    _properties = ("complete",)

    #: Address of the checkpoint, without credentials.
    source: str
    #: The cache directory.
    cache: str
    #: Its files.
    files: tuple[PrefetchedFile, ...]
    #: Seconds from the call until everything was on the disk.
    seconds: float

    @property
    def complete(self) -> bool:
        """Whether all files are local now."""
        return all(file.problem is None for file in self.files)

    def sections(self) -> Iterator[Section]:
        """Yield how much was requested, the files, and what is not cached."""
        requested = sum(file.requested_bytes for file in self.files)
        total = format_bytes(sum(file.nbytes for file in self.files))
        local = sum(file.problem is None for file in self.files)
        yield Strong(f"{local:,} of {counted(len(self.files), 'file')} of {self.source} are in the cache, {total}")
        yield f"requested {format_rate(requested, self.seconds)}, directory {self.cache}"
        rows = ((file.path, f"{file.nbytes:,}", f"{file.requested_bytes:,}", str(file.requests)) for file in self.files)
        yield Grid.first(("file", ">bytes", ">requested", ">requests"), rows, len(self.files))
        yield from (f"{file.path}: {file.problem}" for file in self.files if file.problem is not None)
