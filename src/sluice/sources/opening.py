"""The one place where a path, a URL or a file object becomes a source, and a path becomes a directory."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, BinaryIO, TypeAlias, cast

from sluice._errors import MissingFileError, UnsupportedError
from sluice._messages import first_names, type_of
from sluice.sources.directory import Directory, DirectoryEntry, LocalDirectory
from sluice.sources.file_objects import local_path
from sluice.sources.local import LocalFile
from sluice.sources.memory import MemoryFile
from sluice.sources.protocol import Source

if TYPE_CHECKING:
    from sluice.sources.remote.location import Remote

__all__ = [
    "UPLOAD_ADVICE",
    "Location",
    "NamedFiles",
    "PathOrAddress",
    "SourceLocation",
    "check_listed",
    "file_below",
    "is_remote",
    "location_list",
    "location_name",
    "location_of",
    "location_text",
    "open_directory",
    "open_source",
    "parent_directory",
    "refuse_url",
    "source_path",
    "stream_source",
]

#: Advice for a URL as the destination of a save.
UPLOAD_ADVICE = "Write to a local path, then copy the files."

#: Where a file or directory is: a path, a URL, or a ``Remote``.
Location: TypeAlias = "str | Remote"

#: Types of paths and addresses.
PathOrAddress: TypeAlias = "str | os.PathLike[str] | Remote"

#: Types of paths, addresses and file objects that ``open_source`` accepts.
SourceLocation: TypeAlias = "PathOrAddress | BinaryIO"


def source_path(where: str | os.PathLike[str]) -> str:
    """Return a path as text, with ``~`` expanded unless that name exists; ``file://`` URLs are paths as well."""
    path = os.fsdecode(where)
    if path.startswith("file://") and not os.path.lexists(path):
        # Here, not above: a path needs no URL.
        from sluice.sources.remote_names import path_of_file_url

        return path_of_file_url(path)
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path


def location_of(where: object) -> Location | None:
    """Return where something is that a user passed as a source; None for file objects and everything else."""
    if isinstance(where, (str, os.PathLike)):
        return source_path(where)
    if hasattr(where, "read") or isinstance(where, (list, tuple, dict)):
        return None
    # Here, not above: a path does not need it.
    from sluice.sources.remote.location import remote_location

    return remote_location(where)


def is_remote(where: Location) -> bool:
    """Return whether a location is a ``Remote``, or a URL that is not the name of a local file or directory."""
    if not isinstance(where, str):
        return True
    if "://" not in where:
        return False
    # Here, not above: a path of a file does not need it.
    from sluice.sources.remote_names import is_url

    return is_url(where) and not os.path.lexists(where)


def location_text(where: Location) -> str:
    """Return a location for messages and reports, without credentials."""
    if not isinstance(where, str):
        return where.address
    if not is_remote(where):
        return where
    from sluice.sources.remote_names import without_credentials

    return without_credentials(where)


def location_name(where: Location) -> str:
    """Return the last part of a location, without the query of a URL."""
    return location_text(where).rstrip("/").rpartition("/")[2] if is_remote(where) else os.path.basename(str(where))


def location_list(where: Sequence[object]) -> list[Location]:
    """Return the locations of a list of files that are one checkpoint.

    Raises:
        TypeError: A member is neither a path nor a URL.
        ValueError: The list is empty, or names a file twice.
    """
    locations = []
    for each in where:
        location = location_of(each)
        if location is None:
            raise TypeError(f"source is a list with {type_of(each)}; a list holds paths of files")
        locations.append(location)
    if not locations:
        raise ValueError("source is an empty list; it holds the paths of the files of one checkpoint")
    texts = list(map(location_text, locations))
    twice = next((text for position, text in enumerate(texts) if text in texts[:position]), None)
    if twice is not None:
        raise ValueError(f"source is a list that names {twice!r} twice")
    return locations


def check_listed(locations: Sequence[Location]) -> None:
    """Check that the paths of a list can be files. What else is wrong with a file, its opening says.

    Raises:
        MissingFileError: There is nothing at some of them.
        UnsupportedError: One is a directory.
    """
    missing = []
    for path in locations:
        if is_remote(path) or not isinstance(path, str):
            continue
        if os.path.isdir(path):
            problem = "the list names a directory among files"
            raise UnsupportedError(problem, file=path, advice="Name files, or pass the directory alone.")
        try:
            os.stat(path)
        except FileNotFoundError:
            missing.append(path)
        except (OSError, ValueError):  # the error of opening it says more
            pass
    if missing:
        advice = _missing_advice(missing[0])
        if len(missing) == 1:
            raise MissingFileError("the file does not exist", file=missing[0], advice=advice)
        problem = f"{len(missing)} files of the list do not exist: {first_names(missing)}"
        raise MissingFileError(problem, file=missing[0], advice=advice)


def open_source(where: SourceLocation) -> Source:
    """Return the source at a path, or the file of a file object; no data is read.

    The position of a file object is ignored; ``stream_source`` returns it.

    Raises:
        CheckpointError: The file does not exist, is empty or is not a regular file.
        ReadError: The file cannot be examined.
        UnsupportedError: It is a directory, or a URL whose library is not installed.
        RemoteError: A server does not answer.
        TypeError: It is neither a path nor a file object that can be read.
    """
    path = location_of(where)
    if path is None:
        return stream_source(cast("BinaryIO", where))[0]
    if not path:
        raise MissingFileError("the path is empty", advice="Pass the path of a file or a directory.")
    if is_remote(path) or not isinstance(path, str):
        # Here, and in the functions below: local files do without.
        from sluice.sources.remote.opening import open_remote

        return open_remote(path)
    try:
        return LocalFile(path)
    except MissingFileError as error:
        error.advice = _missing_advice(path)
        raise


def stream_source(stream: BinaryIO) -> tuple[Source, int]:
    """Return the source that a file object reads, and the position of the object.

    Raises:
        TypeError: It is neither a file on disk nor a ``BytesIO``.
        CheckpointError: It is not a regular file, or is empty.
    """
    if isinstance(stream, io.BytesIO):
        return MemoryFile(stream), stream.tell()
    if not hasattr(stream, "read"):
        raise TypeError(f"source is {type_of(stream)}; {_instead(stream)}")
    if hasattr(stream, "fs"):
        from sluice.sources.remote.location import remote_location
        from sluice.sources.remote.opening import open_remote

        remote = remote_location(stream)
        if remote is not None:
            return open_remote(remote), stream.tell()
    path = local_path(stream)
    if stream.writable():
        stream.flush()
    return LocalFile(path), stream.tell()


def open_directory(where: str | os.PathLike[str] | Remote) -> Directory | None:
    """Return the directory at a location, or None if that is anything else, or nothing.

    Raises:
        UnsupportedError: It is a URL whose library is not installed.
        RemoteError: A server does not answer.
    """
    path = source_path(where) if isinstance(where, (str, os.PathLike)) else where
    if isinstance(path, str) and not is_remote(path):
        return LocalDirectory(path) if os.path.isdir(path) else None
    from sluice.sources.remote.opening import open_remote_directory

    return open_remote_directory(path)


def open_place(where: Location) -> Directory | Source:
    """Return the directory or the file at an address, for fewer requests than ``open_directory`` and ``open_source``.

    Raises:
        MissingFileError: There is neither.
        UnsupportedError: The library of the URL is not installed.
        RemoteError: The server does not answer.
    """
    from sluice.sources.remote.opening import open_remote_place

    return open_remote_place(where)


def parent_directory(where: Location) -> tuple[Directory, str]:
    """Return the directory that holds a file, and the name of the file in it."""
    if isinstance(where, str) and not is_remote(where):
        directory, name = os.path.split(where)
        return LocalDirectory(directory), name
    from sluice.sources.remote.opening import remote_parent

    return remote_parent(where)


def file_below(where: Location, name: str) -> Location:
    """Return the location of a file in a directory."""
    if isinstance(where, str) and not is_remote(where):
        return os.path.join(where, name)
    from sluice.sources.remote.directory import below

    return below(where, name)


class NamedFiles:
    """Files that the caller named one by one; see ``Directory``. The names are locations as text."""

    def __init__(self, path: str, locations: Sequence[Location]) -> None:
        """Keep the files.

        Args:
            path: Text that stands for all of them in messages.
            locations: The files.
        """
        self.path = path
        self._locations = {location_text(each): each for each in locations}

    def entries(self) -> Iterator[DirectoryEntry]:
        return iter(())

    def open(self, name: str) -> Source:
        return open_source(self._locations[name])

    def check_inside(self, name: str) -> None:
        """Return: the caller chose each file, links included."""


def refuse_url(path: str, *, advice: str | None = None) -> str:
    """Return a local path; a URL is one if a local file or directory has that name.

    Args:
        path: The path.
        advice: What to do with a URL; None if it is to be read.

    Raises:
        UnsupportedError: It is a URL.
    """
    if is_remote(path):
        # Here, not above: a path of a file does not need it.
        from sluice.sources.remote_names import download_advice, without_credentials

        problem = "a local path is needed here, not a URL"
        raise UnsupportedError(problem, file=without_credentials(path), advice=advice or download_advice(path))
    return path


def _missing_advice(path: str) -> str:
    # Here, not above: only errors need it.
    from sluice.sources.remote_names import missing_advice

    return missing_advice(path)


def _instead(value: object) -> str:
    """Return what to pass instead of an object that is not a source."""
    if isinstance(value, (bytes, bytearray, memoryview)):
        return "pass io.BytesIO(data) for the bytes of a file, or os.fsdecode(name) for its name"
    if hasattr(value, "named_parameters"):
        return "sluice.load_into(model, source) loads into a module, and sluice.save writes it"
    if isinstance(value, Mapping):
        return "a state dict in memory needs no loading: pass it to load_state_dict of the module or optimizer"
    return (
        "write the path or URL of a file or directory, a list of files, an object that open(path, 'rb') returned, or "
        "io.BytesIO(stream.read())"
    )
