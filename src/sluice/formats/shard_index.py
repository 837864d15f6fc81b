"""The index of a sharded checkpoint: a JSON file that maps each tensor to its shard.

Layout, as transformers, diffusers and huggingface_hub write it::

    {"metadata": {"total_size": BYTES, ...}, "weight_map": {"NAME": "FILE", ...}}

accelerate also reads an index that is the weight map itself: ``{"NAME": "FILE", ...}``. It is taken for an index if
every value has the suffix of a checkpoint file; other JSON files next to a model may also map texts to texts.

Limits: the size of the file (``Limits.header_bytes``), before it is read; its commas and containers (``Limits.entries``
and a fixed number), before it is parsed, as each becomes Python objects; ``Limits.files`` and ``Limits.name_bytes``.

Refused: anything but strict JSON in UTF-8, including what the parser of Python accepts: repeated names, NaN,
infinities, lone surrogates, byte-order marks. A weight map that is empty or does not map strings to strings. A file
name that is not a plain relative path with forward slashes: it must mean the same on every platform, stay below the
directory of the index, and have one spelling.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from sluice._errors import CheckpointError, FormatError, LimitError, PathEscapeError, UnsupportedError
from sluice._options import Limits
from sluice.formats.foreign import recognise_placeholder
from sluice.formats.strict_json import kind_of, parse_strict_json
from sluice.records.bulk import collector_paused
from sluice.sources.protocol import Source

__all__ = ["ShardIndex", "is_plain_path", "parse_shard_index", "read_shard_index"]

#: Most objects and lists in the file. Real indexes have three, and metadata may hold more; the parser recurses for each
#: nested one.
_MOST_CONTAINERS = 500

#: A string; an unterminated one runs to the end of the file, so that no byte is examined twice.
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)

#: Bytes of the head that shows what a file is instead of an index.
_HEAD_BYTES = 4096

#: Suffixes of the files of an index without ``weight_map``.
_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")

#: Most quotes of one tensor: four around its name and its file name, and as many inside them.
_QUOTES = 8


class ShardIndex(Struct, frozen=True, kw_only=True):
    """The content of an index file, not yet checked against the shards."""

    #: The index file.
    path: str
    #: File name of the shard for each tensor, relative to the directory of the index.
    weight_map: Mapping[str, str]
    #: Bytes of all tensors as declared in the index, or None.
    total_bytes: int | float | None


def read_shard_index(source: Source, limits: Limits) -> ShardIndex:
    """Read and check an index file; the shards are not examined.

    Raises:
        CheckpointError: The file violates the format.
        PathEscapeError: It names a file outside its directory.
    """
    nbytes = source.identity.nbytes
    if nbytes > limits.header_bytes:
        raise _over_limit("header_bytes", source.path, limits, found=nbytes)
    return parse_shard_index(source.read_at(0, nbytes), source.path, limits)


def parse_shard_index(data: bytes, path: str, limits: Limits) -> ShardIndex:
    """Parse and check the bytes of an index file; raises as ``read_shard_index`` does."""
    with collector_paused():
        content = _parse(data, path, limits)
    weight_map = content.get("weight_map")
    if "weight_map" not in content and _is_bare_map(content):
        weight_map, content = content, {}
    elif "weight_map" not in content:
        raise UnsupportedError("not the index of a sharded checkpoint: the JSON text has no weight_map", file=path)
    if not isinstance(weight_map, dict) or not weight_map:
        raise FormatError("weight_map is not a JSON object with tensor names", file=path, found=kind_of(weight_map))
    _check_weight_map(weight_map, path, limits)
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    numeric = isinstance(total, (int, float)) and not isinstance(total, bool)
    return ShardIndex(path=path, weight_map=weight_map, total_bytes=total if numeric else None)


def _is_bare_map(content: dict[str, object]) -> bool:
    return bool(content) and all(type(file) is str and file.endswith(_SUFFIXES) for file in content.values())


def _parse(data: bytes, path: str, limits: Limits) -> dict[str, object]:
    if data.count(b'"') > _QUOTES * (limits.entries + _MOST_CONTAINERS):
        raise _over_limit("entries", path, limits, found=data.count(b'"') // _QUOTES)
    structure = _STRING.sub(b"", data)
    if structure.count(b",") > limits.entries:
        raise _over_limit("entries", path, limits, found=structure.count(b","))
    if structure.count(b"[") + structure.count(b"{") > _MOST_CONTAINERS:
        expected = f"at most {_MOST_CONTAINERS} brackets"
        raise LimitError("the index has too many lists and objects", file=path, expected=expected)
    try:
        content = parse_strict_json(data)
    except (ValueError, RecursionError) as error:
        placeholder = recognise_placeholder(data[:_HEAD_BYTES], path)
        raise placeholder or FormatError(f"the index is not strict JSON: {error}", file=path) from error
    if not isinstance(content, dict):
        raise FormatError("the index is not a JSON object", file=path, found=kind_of(content))
    return content


def _check_weight_map(weight_map: dict[str, object], path: str, limits: Limits) -> None:
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise FormatError(
                "the value in the weight map is not a file name", file=path, tensor=name, found=kind_of(file)
            )
    if len(weight_map) > limits.entries:
        raise _over_limit("entries", path, limits, found=len(weight_map))
    files = {str(file) for file in weight_map.values()}
    if len(files) > limits.files:
        raise _over_limit("files", path, limits, found=len(files))
    for text in (*weight_map, *files):
        _check_text(text, path, limits)
    for file in files:
        if not is_plain_path(file):
            raise PathEscapeError(
                "a file name in the index is not a plain path below the directory of the index",
                file=path,
                tensor=next(name for name, where in weight_map.items() if where == file),
                found=repr(file),
            )


def _check_text(text: str, path: str, limits: Limits) -> None:
    try:
        nbytes = len(text.encode())
    except UnicodeEncodeError as error:
        raise FormatError("a name contains a lone surrogate", file=path, found=repr(text[:80])) from error
    if nbytes > limits.name_bytes:
        raise _over_limit("name_bytes", path, limits, found=nbytes)


def is_plain_path(file: str) -> bool:
    """Return whether a file name means the same path below the directory on every platform.

    Windows drops trailing dots and blanks of a component, so that ``".. "`` is ``".."`` there; a colon separates a
    drive or a stream.
    """
    if any(character in file for character in "\\:\0"):
        return False
    return all(component.rstrip(". ") for component in file.split("/"))


def _over_limit(limit: str, path: str, limits: Limits, *, found: int) -> CheckpointError:
    expected = f"at most {getattr(limits, limit)}"
    return LimitError(f"the index exceeds the limit {limit!r}", file=path, expected=expected, found=found)
