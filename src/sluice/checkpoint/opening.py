"""Open a checkpoint: ``classify`` finds out what is at a location, ``open_layout`` opens the files that it names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from msgspec.structs import replace

from sluice._options import TEXT_ENCODING, Limits
from sluice.checkpoint.layout import METADATA_FILE, CheckpointLayout
from sluice.checkpoint.open_file import OpenFile, open_alone
from sluice.formats.archives.tar import TarDirectory, is_tar
from sluice.records import Index
from sluice.sources.directory import Directory
from sluice.sources.opening import Location, PathOrAddress, Place, SourceLocation, find_place
from sluice.sources.protocol import Source

__all__ = ["classify", "open_layout"]

_TAR_HEADER_BYTES = 512

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
    found = None if place.kind == "list" or described else _unpacked(place, limits)
    if found is None or hasattr(found, "entries"):
        # Here, and below: most checkpoints are one file.
        from sluice.checkpoint.survey import layout_of_several

        try:
            return replace(layout_of_several(place, found, limits), place=asked)
        except BaseException:
            if isinstance(found, TarDirectory):
                found.close()
            raise
    start = None if place.stream is None else place.stream.tell()
    return CheckpointLayout(path=place.title or found.path, place=place, kind="file", source=found, start=start)


def _unpacked(place: Place, limits: Limits) -> Source | Directory:
    """Return the file or directory at a place; of a tar archive, its members."""
    found = place.open()
    if hasattr(found, "entries") or (place.stream is not None and place.stream.tell()):
        return found
    try:
        packed = is_tar(found.read_at(0, min(_TAR_HEADER_BYTES, found.identity.nbytes)))
        return TarDirectory(found, limits) if packed else found
    except BaseException:
        found.close()
        raise


def _parts(path: Location, name: str, count: int) -> list[Location]:
    """Return all parts of a divided GGUF file from the location of the first, as llama.cpp does."""
    parts: list[Location] = []
    for number in range(1, count + 1):
        text = _FIRST_PART.sub(f"-{number:05}-of-{count:05}.gguf", name)
        if isinstance(path, str):
            parts.append(path.replace(name, text))
        else:
            parts.append(dataclasses.replace(path, url=path.url.replace(name, text)))
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
    if layout.source is not None:
        return open_alone(layout.source, limits, encoding, start=layout.start)
    from sluice.checkpoint.several_files import open_files

    return open_files(layout, limits, encoding)
