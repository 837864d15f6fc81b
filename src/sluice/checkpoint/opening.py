"""Open a checkpoint: a file, or an object inside a file; ``several_files`` opens directories and lists."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence

from msgspec.structs import replace

from sluice._errors import CheckpointError, TruncatedError
from sluice._options import TEXT_ENCODING, Limits
from sluice.checkpoint.names import METADATA_FILE
from sluice.checkpoint.one_file import one_file, open_alone
from sluice.checkpoint.open_file import OpenFile
from sluice.formats.detection import detect
from sluice.records import Index
from sluice.sources.opening import Location, is_remote, location_name, open_source
from sluice.sources.protocol import Source
from sluice.sources.section import Section

__all__ = ["open_list", "open_path", "open_section"]

#: End of the name of the first of several parts of a GGUF file; of one part, the file is whole.
_FIRST_PART = re.compile(r"-00001-of-(?!0000[01])([0-9]{5})\.gguf$")


def open_path(path: Location, limits: Limits, encoding: str = TEXT_ENCODING) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open a file, a directory or the index file of a sharded checkpoint; reads no tensor data.

    ``path`` is a path, a URL or a ``Remote``. One that ends in ``.json`` must be an index file; ``.metadata`` means its
    directory. ``encoding`` is that of text which Python 2 wrote.

    Returns:
        The index of the checkpoint, and its files in the order of ``Index.files``.

    Raises:
        IncompleteCheckpointError: Files are missing.
        CheckpointError: A file is damaged, unsafe or of an unknown format, or the files contradict each other.
        ReadError: A file cannot be read.
        RemoteError: A server does not answer.
        UnsupportedError: The format is one that sluice does not read, or the library of a URL is not installed.
    """
    name = location_name(path)
    if (divided := _FIRST_PART.search(name)) is not None:
        return open_list(_parts(path, name, int(divided[1])), limits, encoding)
    if is_remote(path) or os.path.isdir(str(path)) or name.endswith(".json") or name == METADATA_FILE:
        # Here, not above: most checkpoints are one file.
        from sluice.checkpoint.several_files import open_files_at

        found = open_files_at(path, limits, encoding)
        if found is not None:
            return found
    return open_alone(open_source(path), limits, encoding)


def _parts(path: Location, name: str, count: int) -> list[Location]:
    """Return all parts of a divided GGUF file from the location of the first, as llama.cpp does."""
    parts: list[Location] = []
    for number in range(1, count + 1):
        text = f"-{number:05}-of-{count:05}.gguf"
        if isinstance(path, str):
            parts.append(path.replace(name, _FIRST_PART.sub(text, name)))
        else:
            parts.append(dataclasses.replace(path, url=path.url.replace(name, _FIRST_PART.sub(text, name))))
    return parts


def open_list(
    paths: Sequence[Location], limits: Limits, encoding: str = TEXT_ENCODING
) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open files that are one checkpoint together; returns and raises as ``open_path`` does.

    The files hold state dicts without common names. A list of one path is the same as the path.

    Raises:
        MissingFileError: There is nothing at some of the paths.
    """
    if len(paths) == 1:
        return open_path(paths[0], limits, encoding)
    # As in open_path.
    from sluice.checkpoint.several_files import open_listed

    return open_listed(paths, limits, encoding)


def open_section(
    source: Source, start: int, limits: Limits, encoding: str = TEXT_ENCODING
) -> tuple[Index, tuple[OpenFile, ...], int]:
    """Open the checkpoint that starts at byte ``start`` of a source; closes the source if that fails.

    Returns:
        Its index, its only file, and the offset of the first byte after it: that of the next object in legacy files,
        the end of the source in all other formats.

    Raises:
        CheckpointError: The checkpoint is damaged, unsafe or of an unknown format.
    """
    try:
        left = source.identity.nbytes - start
        if left <= 0:
            problem = "the file ends where a checkpoint should start"
            raise TruncatedError(problem, file=source.path, offset=start, found="nothing")
        section = Section(source, start, left)
        try:
            file_format = detect(section, encoding=encoding)
            own = file_format.read_index(section, limits)
            index = one_file(own, limits)
        except CheckpointError as error:
            if error.offset is not None:
                error.offset += start
            raise
    except BaseException:
        source.close()
        raise
    storages = tuple(replace(storage, offset=storage.offset + start) for storage in index.storages)
    end = start + (left if own.end is None else own.end)
    files = tuple(replace(file, identity=source.identity) for file in index.files)
    index = replace(index, storages=storages, files=files)
    return index, (OpenFile(source=source, locator=file_format, index=own, start=start),), end
