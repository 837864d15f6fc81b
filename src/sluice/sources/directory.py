"""Directories as a seam: named entries that can be listed, opened as sources and checked for containment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from sluice._errors import PathEscapeError
from sluice._messages import read_error
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source

__all__ = ["Directory", "DirectoryEntry", "EntryKind", "LocalDirectory"]

#: ``link``: a symbolic link to anything, which was not followed. ``special``: a FIFO, a socket or a device.
EntryKind: TypeAlias = Literal["file", "directory", "link", "special"]


class DirectoryEntry(Protocol):
    """One name in a listing."""

    @property
    def name(self) -> str:
        """The name, without the directory."""
        ...

    @property
    def kind(self) -> EntryKind:
        """The kind of entry, as the listing reports it.

        Raises:
            ReadError: The listing does not report it, and the entry cannot be examined.
        """
        ...


class Directory(Protocol):
    """A place that holds files by name: a local directory, or a prefix of an object store.

    Names given to ``open`` and ``check_inside`` are relative, with forward slashes, and may lead into subdirectories.
    """

    @property
    def path(self) -> str:
        """Path or address as the user would type it, without credentials."""
        ...

    def entries(self) -> Iterator[DirectoryEntry]:
        """Yield the entries in any order; entries of subdirectories are not included.

        Raises:
            ReadError: The listing fails.
        """
        ...

    def open(self, name: str) -> Source:
        """Return the file ``name`` as a source; no data is read.

        Raises:
            CheckpointError: It is missing (raised from ``FileNotFoundError``), empty or not a regular file.
            ReadError: It cannot be examined.
        """
        ...

    def check_inside(self, name: str) -> None:
        """Check that ``name`` does not lead out of the directory, as a symbolic link can.

        Raises:
            PathEscapeError: It leads outside.
        """
        ...


class LocalDirectory:
    """A directory of this machine; see ``Directory``."""

    def __init__(self, path: str) -> None:
        """Keep the path; an empty one is the current directory."""
        self.path = path

    def entries(self) -> Iterator[DirectoryEntry]:
        try:
            with os.scandir(self.path) as listing:
                for entry in listing:
                    yield _LocalEntry(entry)
        except OSError as error:
            raise read_error("the directory cannot be listed", error, file=self.path) from error

    def open(self, name: str) -> Source:
        return LocalFile(os.path.join(self.path, name))

    def check_inside(self, name: str) -> None:
        path = os.path.join(self.path, name)
        real = Path(os.path.realpath(path))
        if not real.is_relative_to(os.path.realpath(self.path)):
            problem = "a symbolic link leads out of the checkpoint directory"
            advice = "Do not trust this checkpoint; if the links are yours, allow them in sluice.Limits."
            raise PathEscapeError(problem, file=path, found=str(real), advice=advice)


class _LocalEntry:
    __slots__ = ("_entry", "name")

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self.name = entry.name
        self._entry = entry

    @property
    def kind(self) -> EntryKind:
        # Most file systems report the kind with the name; the others need a stat of the entry.
        try:
            if self._entry.is_symlink():
                return "link"
            if self._entry.is_dir(follow_symlinks=False):
                return "directory"
            return "file" if self._entry.is_file(follow_symlinks=False) else "special"
        except OSError as error:
            raise read_error("the file cannot be examined", error, file=self._entry.path) from error
