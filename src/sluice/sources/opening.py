"""The one place where a path, a URL or a file object becomes a source, and a path becomes a directory."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from typing import BinaryIO, TypeAlias

from sluice._errors import MissingFileError, UnsupportedError
from sluice._messages import first_names, type_of
from sluice.sources.directory import Directory, LocalDirectory
from sluice.sources.file_objects import local_path
from sluice.sources.local import LocalFile
from sluice.sources.memory import MemoryFile
from sluice.sources.protocol import Source

__all__ = [
    "SourceLocation",
    "check_listed",
    "open_directory",
    "open_source",
    "parent_directory",
    "path_list",
    "refuse_url",
    "source_path",
    "stream_source",
]

#: Types of paths and file objects that ``open_source`` accepts.
SourceLocation: TypeAlias = "str | os.PathLike[str] | BinaryIO"


def source_path(where: str | os.PathLike[str]) -> str:
    """Return a path as text, with ``~`` expanded unless that name exists."""
    path = os.fsdecode(where)
    return os.path.expanduser(path) if path.startswith("~") and not os.path.lexists(path) else path


def path_list(where: Sequence[object]) -> list[str]:
    """Return the paths of a list of files that are one checkpoint.

    Raises:
        TypeError: A member is not a path.
        ValueError: The list is empty, or names a file twice.
    """
    wrong = next((each for each in where if not isinstance(each, (str, os.PathLike))), None)
    if wrong is not None:
        raise TypeError(f"source is a list with {type_of(wrong)}; a list holds paths of files")
    paths = [source_path(each) for each in where if isinstance(each, (str, os.PathLike))]
    if not paths:
        raise ValueError("source is an empty list; it holds the paths of the files of one checkpoint")
    twice = next((path for position, path in enumerate(paths) if path in paths[:position]), None)
    if twice is not None:
        raise ValueError(f"source is a list that names {twice!r} twice")
    return paths


def check_listed(paths: Sequence[str]) -> None:
    """Check that the paths of a list can be files. What else is wrong with a file, its opening says.

    Raises:
        MissingFileError: There is nothing at some of them.
        UnsupportedError: One is a directory, or a URL.
    """
    missing = []
    for path in paths:
        refuse_url(path)
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
        UnsupportedError: It is a directory, or a URL: remote sources are not supported yet.
        TypeError: It is neither a path nor a file object that can be read.
    """
    if not isinstance(where, (str, os.PathLike)):
        return stream_source(where)[0]
    path = source_path(where)
    if not path:
        raise MissingFileError("the path is empty", advice="Pass the path of a file or a directory.")
    refuse_url(path)
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
    path = local_path(stream)
    if stream.writable():
        stream.flush()
    return LocalFile(path), stream.tell()


def open_directory(where: str | os.PathLike[str]) -> Directory | None:
    """Return the directory at a path, or None if the path is anything else, or nothing.

    Raises:
        UnsupportedError: It is a URL: remote sources are not supported yet.
    """
    path = source_path(where)
    if os.path.isdir(path):
        return LocalDirectory(path)
    refuse_url(path)
    return None


def parent_directory(path: str) -> tuple[Directory, str]:
    """Return the directory that holds a file, and the name of the file in it."""
    directory, name = os.path.split(path)
    return LocalDirectory(directory), name


def refuse_url(path: str) -> None:
    """Refuse a URL, unless a local file or directory has that name.

    Raises:
        UnsupportedError: It is a URL: remote sources are not supported yet.
    """
    if "://" not in path:
        return
    # Here, not above: a path of a file does not need it.
    from sluice.sources.remote_names import download_advice, is_url, without_credentials

    if is_url(path) and not os.path.lexists(path):
        raise UnsupportedError(
            "remote sources are not supported yet", file=without_credentials(path), advice=download_advice(path)
        )


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
        "write the path of a file or directory, a list of files, an object that open(path, 'rb') returned, or "
        "io.BytesIO(stream.read())"
    )
