"""The index of a sharded checkpoint: a JSON file that maps each tensor to its shard.

Layout, as transformers, diffusers and huggingface_hub write it::

    {"metadata": {"total_size": BYTES, ...}, "weight_map": {"NAME": "FILE", ...}}

Limits: the size of the file (``Limits.header_bytes``), before it is read; its strings (``Limits.entries``), before they
are decoded; ``Limits.files`` and ``Limits.name_bytes``.

Refused: anything but strict JSON in UTF-8 (``strict_json``). A weight map that is empty or does not map strings to
strings. A file name that is not a plain relative path with forward slashes: it must mean the same on every platform,
stay below the directory of the index, and have one spelling.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from msgspec import Raw, Struct

from sluice._errors import FormatError, PathEscapeError, UnsupportedError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.formats.foreign import recognise_placeholder
from sluice.formats.protocol import read_whole
from sluice.formats.strict_json import count_strings, decode_json
from sluice.records import collector_paused
from sluice.sources.protocol import Source

__all__ = ["ShardIndex", "is_plain_path", "read_shard_index"]

#: Most strings in the file besides those of the weight map.
_MORE_STRINGS = 10_000


class ShardIndex(Struct, frozen=True, kw_only=True):
    """The content of an index file, not yet checked against the shards."""

    #: File name of the shard for each tensor, relative to the directory of the index.
    weight_map: Mapping[str, str]
    #: Bytes of all tensors as declared in the index, or None.
    total_bytes: int | float | None


class _Metadata(Struct):
    """The member of ``metadata`` that sluice uses."""

    total_size: int | float | None = None


def read_shard_index(source: Source, limits: Limits) -> ShardIndex:
    """Read and check an index file; the shards are not examined.

    Raises:
        CheckpointError: The file violates the format.
        PathEscapeError: It names a file outside its directory.
    """
    data, path = read_whole(source, limits, "the index"), source.path
    check_limit(limits, "entries", (count_strings(data) - _MORE_STRINGS + 1) // 2, "the index", file=path)
    with collector_paused():
        try:
            members = decode_json(data, dict[str, Raw], "the index", path)
        except FormatError as error:
            raise recognise_placeholder(data, path) or error from error
        if count_strings(data) != len(members) + sum(map(count_strings, map(bytes, members.values()))):
            raise FormatError("a member of the index is given twice", file=path)
        if "weight_map" not in members:
            raise UnsupportedError("not the index of a sharded checkpoint: the JSON text has no weight_map", file=path)
        raw = bytes(members["weight_map"])
        weight_map = decode_json(raw, dict[str, str], "the weight_map of the index", path)
    _check_weight_map(weight_map, count_strings(raw), path, limits)
    total_bytes: int | float | None = None
    with suppress(FormatError):  # it may be anything
        total_bytes = decode_json(bytes(members.get("metadata", b"null")), _Metadata, "the metadata", path).total_size
    return ShardIndex(weight_map=weight_map, total_bytes=total_bytes)


def _check_weight_map(weight_map: Mapping[str, str], strings: int, path: str, limits: Limits) -> None:
    if not weight_map:
        raise FormatError("the weight_map of the index names no tensors", file=path)
    if strings != 2 * len(weight_map):
        raise FormatError("a tensor is given twice in the weight_map", file=path)
    files = set(weight_map.values())
    longest = max(len(text.encode()) for text in (*weight_map, *files))
    for limit, found in {"entries": len(weight_map), "files": len(files), "name_bytes": longest}.items():
        check_limit(limits, limit, found, "the index", file=path)
    for file in files:
        if not is_plain_path(file):
            raise PathEscapeError(
                "a file name in the index is not a plain path below the directory of the index",
                file=path,
                tensor=next(name for name, where in weight_map.items() if where == file),
                found=repr(file),
            )


def is_plain_path(file: str) -> bool:
    """Return whether a file name means the same path below the directory on every platform.

    Windows drops trailing dots and blanks of a component, so that ``".. "`` is ``".."`` there; a colon separates a
    drive or a stream.
    """
    if any(character in file for character in "\\:\0"):
        return False
    return all(component.rstrip(". ") for component in file.split("/"))
