"""The one place where a path, a URL or a file object becomes a source, and a path becomes a directory."""

from __future__ import annotations

import io
import os
import re
from typing import BinaryIO, TypeAlias

from sluice._errors import UnsupportedError
from sluice.sources.directory import Directory, LocalDirectory
from sluice.sources.file_objects import local_path
from sluice.sources.local import LocalFile
from sluice.sources.memory import MemoryFile
from sluice.sources.protocol import Source

__all__ = ["SourceLocation", "open_directory", "open_source", "parent_directory", "stream_source"]

#: Types of paths and file objects that ``open_source`` accepts.
SourceLocation: TypeAlias = "str | bytes | os.PathLike[str] | BinaryIO"

#: A scheme has at least two characters: one is the drive of a Windows path.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")


def open_source(where: SourceLocation) -> Source:
    """Return the source at a path or a URL, or the file of a file object; no data is read.

    The position of a file object is ignored; ``stream_source`` returns it.

    Raises:
        CheckpointError: The file does not exist, is empty or is not a regular file.
        ReadError: The file cannot be examined.
        UnsupportedError: It is a directory, or a URL: remote sources are not supported yet.
        TypeError: It is neither a path nor a file object that can be read.
    """
    if not isinstance(where, (str, bytes, os.PathLike)):
        return stream_source(where)[0]
    path = os.fsdecode(where)
    _refuse_url(path)
    return LocalFile(path)


def stream_source(stream: BinaryIO) -> tuple[Source, int]:
    """Return the source that a file object reads, and the position of the object.

    Raises:
        TypeError: It is neither a file on disk nor a ``BytesIO``.
        CheckpointError: It is not a regular file, or is empty.
    """
    if isinstance(stream, io.BytesIO):
        return MemoryFile(stream), stream.tell()
    path = local_path(stream)
    if stream.writable():
        stream.flush()
    return LocalFile(path), stream.tell()


def open_directory(where: str | bytes | os.PathLike[str]) -> Directory | None:
    """Return the directory at a path, or None if the path is anything else, or nothing.

    Raises:
        UnsupportedError: It is a URL: remote sources are not supported yet.
    """
    path = os.fsdecode(where)
    if os.path.isdir(path):
        return LocalDirectory(path)
    _refuse_url(path)
    return None


def parent_directory(path: str) -> tuple[Directory, str]:
    """Return the directory that holds a file, and the name of the file in it."""
    directory, name = os.path.split(path)
    return LocalDirectory(directory), name


def _refuse_url(path: str) -> None:
    """Refuse a URL, unless a local file or directory has that name."""
    if _URL.match(path) and not os.path.lexists(path):
        raise UnsupportedError(
            "remote sources are not supported yet",
            file=_without_credentials(path),
            advice="Download the checkpoint first and pass its local path.",
        )


def _without_credentials(url: str) -> str:
    scheme, _, rest = re.split("[?#]", url, maxsplit=1)[0].partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"
