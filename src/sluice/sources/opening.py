"""Where a checkpoint is: paths, URLs, file objects and lists of files become one record, ``Place``."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, TypeAlias, cast

from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import MissingFileError, UnsupportedError
from sluice._messages import type_of
from sluice._units import counted
from sluice.sources.directory import Directory, LocalDirectory
from sluice.sources.local import LocalFile
from sluice.sources.protocol import Source
from sluice.sources.ranges import MemoryFile
from sluice.sources.remote_names import download_advice, is_url, path_of_file_url, without_credentials
from sluice.sources.remote_names import missing_advice as similar_names

if TYPE_CHECKING:
    from sluice.sources.remote.location import Remote

__all__ = [
    "UPLOAD_ADVICE",
    "Location",
    "PathOrAddress",
    "Place",
    "SourceLocation",
    "find_place",
    "is_remote",
    "refuse_url",
    "source_path",
]

#: Advice for a URL as the destination of a save.
UPLOAD_ADVICE = "Write to a local path, then copy the files."

#: Where a file or directory is: a path, a URL, or a ``Remote``.
Location: TypeAlias = "str | Remote"

#: Types of paths and addresses.
PathOrAddress: TypeAlias = "str | os.PathLike[str] | Remote"

#: Types of paths, addresses and file objects that ``find_place`` accepts.
SourceLocation: TypeAlias = "PathOrAddress | BinaryIO"


class Place(Struct, frozen=True, kw_only=True):
    """Where a source is, decided once from what the user passed; nothing was examined yet."""

    #: How it is reached: ``local`` and ``remote`` have a location, ``list`` has members, ``stream`` a file object.
    kind: Literal["local", "remote", "list", "stream"]
    #: Text for messages and reports: a path; an address without credentials; the first of a list and their number.
    title: str
    #: Last part of the location, without the query of a URL.
    name: str = ""
    #: A path, or a ``Remote``.
    location: Location = ""
    members: tuple[Place, ...] = ()
    stream: BinaryIO | None = None

    def open(self) -> Source | Directory:
        """Return the file or the directory that is there; no data is read.

        Raises:
            CheckpointError: There is nothing, or the file is empty or not a regular file.
            ReadError: It cannot be examined.
            UnsupportedError: It is a URL whose library is not installed.
            RemoteError: A server does not answer.
        """
        if self.kind == "remote":
            return cast("Source | Directory", _remote().open_remote_place(self.location))
        return LocalDirectory(self.title) if self.kind == "local" and os.path.isdir(self.title) else self.open_file()

    def directory(self) -> Directory | None:
        """Return the directory that is there; None if there is anything else, or nothing; raises as ``open`` does."""
        if self.kind == "local":
            return LocalDirectory(self.title) if os.path.isdir(self.title) else None
        return cast("Directory | None", _remote().open_remote_directory(self.location))

    def open_file(self, commits: dict[Any, Any] | None = None) -> Source:
        """Return the file that is there; raises as ``open`` does, and ``UnsupportedError`` for a directory.

        Args:
            commits: Empty at first; the files of one checkpoint that share it are of one commit of the hub.
        """
        if self.kind == "remote":
            return cast("Source", _remote().open_remote(self.location, commits))
        if self.stream is not None:
            return _stream_source(self.stream)
        if not self.location:
            raise MissingFileError("the path is empty", advice="Pass the path of a file or a directory.")
        try:
            return LocalFile(str(self.location))
        except MissingFileError as error:
            error.advice = missing_advice(self.title)
            raise

    def parent(self) -> Directory:
        """Return the directory that holds the file."""
        if self.kind == "local":
            return LocalDirectory(os.path.dirname(str(self.location)))
        return cast("Directory", _remote().remote_parent(self.location))

    def below(self, name: str) -> Location:
        """Return the location of a file in the directory that is there."""
        if self.kind == "local":
            return os.path.join(str(self.location), name)
        return cast("Location", _remote().below(self.location, name))


def _remote() -> Any:
    """Return the module that opens addresses; local files do without."""
    from sluice.sources.remote import opening

    return opening


def find_place(where: object) -> Place:
    """Return the place that a ``source`` argument means.

    Raises:
        TypeError: It is not a source, or is a list with something else than paths and URLs.
        ValueError: It is an empty list, or a list that names a file twice.
    """
    if isinstance(where, (str, os.PathLike)):
        path = source_path(where)
        if "://" in path and is_remote(path):
            return _remote_place(_remote().Remote(path))
        return Place(kind="local", title=path, name=os.path.basename(path), location=path)
    if isinstance(where, (list, tuple)):
        return _listed(where)
    if not hasattr(where, "read") and not isinstance(where, dict):
        remote = _remote().remote_location(where)
        if remote is not None:
            return _remote_place(remote)
    if not hasattr(where, "read"):
        raise TypeError(f"source is {type_of(where)}; {_instead(where)}")
    name = getattr(where, "name", "")
    title = source_path(name) if isinstance(name, (str, os.PathLike)) else ""
    return Place(kind="stream", title=title, stream=cast("BinaryIO", where))


def _remote_place(remote: Remote) -> Place:
    name = remote.address.rstrip("/").rpartition("/")[2]
    return Place(kind="remote", title=remote.address, name=name, location=remote)


def _listed(where: Sequence[object]) -> Place:
    members = list(map(_member, where))
    if not members:
        raise ValueError("source is an empty list; it holds the paths of the files of one checkpoint")
    addresses: set[tuple[str, int]] = set()
    titles: Counter[str] = Counter()
    for number, member in enumerate(members):
        remote = None if isinstance(member.location, str) else member.location
        address = (str(member.location), id(None)) if remote is None else (remote.url, id(remote.store))
        if address in addresses:
            raise ValueError(f"source is a list that names {member.title!r} twice")
        addresses.add(address)
        titles[member.title] += 1
        if titles[member.title] > 1:  # another query, or another store
            members[number] = replace(member, title=f"{member.title} ({titles[member.title]})")
    if len(members) == 1:
        return members[0]
    title = f"{members[0].title} and {counted(len(members) - 1, 'more file')}"
    return Place(kind="list", title=title, members=tuple(members))


def _member(where: object) -> Place:
    try:
        place = find_place(where)
    except (TypeError, ValueError):
        place = None
    if place is None or place.kind not in {"local", "remote"} or isinstance(where, (list, tuple)):
        raise TypeError(f"source is a list with {type_of(where)}; a list holds paths of files")
    return place


def source_path(where: str | os.PathLike[str]) -> str:
    """Return a path as text, with ``~`` expanded unless that name exists; ``file://`` URLs are paths as well."""
    path = os.fsdecode(where)
    if path.startswith("file://") and not os.path.lexists(path):
        return path_of_file_url(path)
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path


def is_remote(path: str) -> bool:
    """Return whether a text is a URL that is not the name of a local file or directory."""
    return is_url(path) and not os.path.lexists(path)


def _stream_source(stream: BinaryIO) -> Source:
    """Return the source that a file object reads.

    Raises:
        TypeError: It is neither a file on disk nor a ``BytesIO``.
        CheckpointError: It is not a regular file, or is empty.
    """
    if isinstance(stream, io.BytesIO):
        return MemoryFile(stream)
    if hasattr(stream, "fs"):
        remote = _remote().remote_location(stream)
        if remote is not None:
            return cast("Source", _remote().open_remote(remote))
    path = _local_path(stream)
    if stream.writable():
        stream.flush()
    return LocalFile(path)


def _local_path(stream: BinaryIO) -> str:
    """Return a path under which the file of a file object can be opened again.

    A file on disk is read through descriptors of its own, never through the object, so that readers do not share the
    position of the object. A file whose name is gone is reached through the descriptor of the object, while it is open.

    Raises:
        TypeError: The object is not a file on disk, or it decodes what it reads, as ``gzip`` and text files do.
    """
    descriptor = _descriptor(stream)
    if descriptor is None:
        raise TypeError(
            f"a checkpoint cannot be read from a {type(stream).__name__}: pass a path, a file opened with "
            "open(path, 'rb'), or io.BytesIO(stream.read())"
        )
    name = stream.name
    if isinstance(name, (str, bytes)):
        try:
            if os.path.samestat(os.stat(name), os.fstat(descriptor)):
                return os.fsdecode(name)
        except OSError:  # deleted or renamed since it was opened
            pass
    return f"/proc/self/fd/{descriptor}"


def _descriptor(stream: object) -> int | None:
    """Return the descriptor whose bytes the object returns verbatim; objects that decompress have one as well."""
    stream = getattr(stream, "file", stream)  # the module tempfile wraps its files
    raw = stream.raw if isinstance(stream, (io.BufferedReader, io.BufferedRandom)) else stream
    return raw.fileno() if isinstance(raw, io.FileIO) else None


def refuse_url(path: str, *, advice: str | None = None) -> str:
    """Return a local path; a URL is one if a local file or directory has that name.

    Args:
        path: The path.
        advice: What to do with a URL; None if it is to be read.

    Raises:
        UnsupportedError: It is a URL.
    """
    if is_remote(path):
        problem = "a local path is needed here, not a URL"
        raise UnsupportedError(problem, file=without_credentials(path), advice=advice or download_advice(path))
    return path


def missing_advice(path: str) -> str:
    """Return what to check about a local path at which there is nothing."""
    if os.path.islink(path):
        return f"It is a symbolic link to {os.readlink(path)!r}, which does not exist."
    return similar_names(path)


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
