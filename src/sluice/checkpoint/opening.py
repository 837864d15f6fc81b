"""Open a checkpoint: ``classify`` finds out what is at a location, ``open_layout`` opens the files that it names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from contextlib import closing
from typing import Any, Literal, TypeAlias

from msgspec.structs import replace

from sluice._options import TEXT_ENCODING, Limits
from sluice.checkpoint.open_file import METADATA_FILE, PLACES, CheckpointLayout, OpenFile, open_file
from sluice.formats.archives.tar import TarDirectory, is_tar
from sluice.formats.detection import Head
from sluice.records import Index
from sluice.sources.opening import Location, PathOrAddress, Place, SourceLocation, find_place
from sluice.sources.wrappers import ReadAhead

__all__ = ["Kind", "classify", "kind_of", "open_layout"]

#: Kinds of locations. An index or metadata file stands for the directory that holds it.
Kind: TypeAlias = Literal["file", "list", "directory", "archive", "index", "metadata"]

#: End of the name of the first of several parts of a GGUF file; of one part, the file is whole.
_FIRST_PART = re.compile(r"-00001-of-(?!0000[01])([0-9]{5})\.gguf$")


def classify(where: SourceLocation | Sequence[PathOrAddress], limits: Limits) -> CheckpointLayout:
    """Return what is at a location; reads no more than the listing of a directory and its index file.

    A path or URL that ends in ``.json`` must be the index file of a sharded checkpoint; ``.metadata`` means its
    directory. Servers are not asked whether one of them is a directory.

    Raises:
        CheckpointError: There is nothing, or a directory without a checkpoint, or the index file is damaged.
        ReadError: It cannot be examined.
        UnsupportedError: The library of a URL is not installed.
        RemoteError: A server does not answer.
        TypeError: It is not a location.
        ValueError: It is an empty list, or a list that names a file twice.
    """
    place = asked = find_place(where)
    divided = _FIRST_PART.search(place.name)
    if divided is not None:
        place = find_place(_parts(place.location, place.name, int(divided[1])))
    described = place.name.endswith(".json") or place.name == METADATA_FILE
    found = None if place.kind == "list" or (described and place.kind == "remote") else place.open()
    source = None if found is None or hasattr(found, "entries") else found
    start = None if place.stream is None else place.stream.tell()
    try:
        head = None if source is None or described or start else Head.of(ReadAhead(source))
        if source is None or head is None or head.known is None:  # most are one file of a known format
            kind = kind_of(place, head, directory=source is not found)
            if source is None or kind != "file":
                return replace(_of_several(place, found, kind, limits), place=asked)
    except BaseException:
        if source is not None:
            source.close()
        raise
    path = place.title or source.path
    return CheckpointLayout(path=path, place=place, kind="file", source=source, head=head, start=start)


def kind_of(place: Place, head: Head | None, *, directory: bool) -> Kind:
    """Return what a place means, from what was looked at: the first bytes of a file, or whether it is a directory."""
    if place.kind == "list":
        return "list"
    if directory:  # also one whose name ends like that of an index
        return "directory"
    if place.name == METADATA_FILE:
        return "metadata"
    if place.name.endswith(".json"):
        return "index"
    return "archive" if head is not None and head.known is None and is_tar(head.data) else "file"


def _of_several(place: Place, found: Any, kind: Kind, limits: Limits) -> CheckpointLayout:
    """Return the layout of anything but one file; ``found`` is the open file or directory, or None."""
    # Here, not above: most checkpoints are one file.
    from sluice.checkpoint.survey import index_layout, listed_layout, survey

    if kind == "list":
        return listed_layout(place, limits)
    if kind in {"directory", "archive"}:
        return survey(TarDirectory(found, limits) if kind == "archive" else found, limits)
    directory = place.parent()
    if kind == "metadata":
        return CheckpointLayout(path=place.title, directory=directory, kind="distributed", files=(METADATA_FILE,))
    with closing(found or directory.open(place.name)) as index_file:
        return index_layout(index_file, directory, limits)


def _parts(path: Location, name: str, count: int) -> list[Location]:
    """Return all parts of a divided GGUF file from the location of the first, whose query may have the name as well."""
    parts: list[Location] = []
    for number in range(1, count + 1):
        text = _FIRST_PART.sub(f"-{number:05}-of-{count:05}.gguf", name)
        where = text.join(re.split(re.escape(name) + "(?!/)", path if isinstance(path, str) else path.url))
        parts.append(where if isinstance(path, str) else dataclasses.replace(path, url=where))
    return parts


def open_layout(
    layout: CheckpointLayout, limits: Limits, encoding: str = TEXT_ENCODING
) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open the files of a layout; reads no tensor data.

    Args:
        layout: What ``classify`` found.
        limits: Bounds for hostile files.
        encoding: Encoding of text that Python 2 wrote.

    Returns:
        The index of the checkpoint, and its files in the order of ``Index.files``.

    Raises:
        IncompleteCheckpointError: Files are missing.
        CheckpointError: A file is damaged, unsafe or of an unknown format, or the files contradict each other.
        ReadError: A file cannot be read.
        RemoteError: A server does not answer.
        UnsupportedError: The format is one that sluice does not read.
    """
    if layout.source is None:
        from sluice.checkpoint.several_files import open_files

        return open_files(layout, limits, encoding)
    file = open_file(layout.source, limits, encoding, layout)
    index, start = file.index, file.start
    try:
        if PLACES in index.metadata or index.tied:
            # Here, not above: few checkpoints have chunks or declare tied names.
            from sluice.checkpoint.declarations import one_file

            index = one_file(index, limits)
    except BaseException:
        file.source.close()
        raise
    if start:
        storages = tuple(replace(storage, offset=storage.offset + start) for storage in index.storages)
        files = tuple(replace(each, identity=file.source.identity) for each in index.files)
        index = replace(index, storages=storages, files=files)
    return index, (file,)
