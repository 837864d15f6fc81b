r"""Declarations in the metadata of files: tied names, and the places of chunks of tensors.

A tensor with several names is stored under one of them, and the file declares the others (``Index.tied``). Tools copy
that declaration to files with other tensors, so all files of a checkpoint are considered together:

- A declared name that any file stores is the stored tensor, as is one that the index file assigns to a different file
  than the tensor that it is tied to.
- A name that files declare for two tensors is tied to the one that is stored next to its declaration. If that does not
  decide, the files contradict each other.
- A name whose tensor no file stores is left out, with a note.

In a directory of parameters, each name has a file, and none are tied: tools that remove duplicates link files of equal
content.

Shards of torch's ``HuggingFaceStorageWriter`` are read if they hold whole tensors; chunks of tensors are refused by
name. Each rank writes ``shard-R-model-I-of-N.safetensors`` with its chunks, under the names of the whole tensors.
``__metadata__`` has the place of each chunk::

    {"DCP_SHARDING_INFO": "{\"a.weight\": {\"saved_offsets\": [4, 0]}, ...}", "DCP_VERSION": "1.0", "format": "pt"}

The shape of a tensor is stored nowhere. A file is read if all its chunks start at the first element: one process writes
whole tensors in this way. Of several ranks, the files of the others show what it is.

Limits: ``Limits.entries`` for the stored and tied names together and for the tensors of the description of chunks,
``Limits.name_bytes`` for each tied name, and ``Limits.dimensions``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import LimitError, UnsupportedError
from sluice._messages import check_limit, listed
from sluice._options import Limits
from sluice.checkpoint.open_file import PLACES
from sluice.formats.strict_json import count_strings, decode_json, has_longer_list, without_strings
from sluice.records import Index

__all__ = ["Declaration", "Ties", "find_ties", "one_file", "without_places"]

_VERSION = "DCP_VERSION"

_CONSOLIDATE = (
    "Consolidate it with HuggingFaceStorageWriter(enable_consolidation=True), or load it with torch's "
    f"HuggingFaceStorageReader. If the file holds whole tensors, its metadata was copied: remove {PLACES!r}."
)


class Declaration(NamedTuple):
    """The tensors and tied names of one file."""

    #: Relative name of the file.
    file: str
    #: Its stored tensors.
    tensors: Mapping[str, object]
    #: Stored name of each further name.
    tied: Mapping[str, str]


class Ties(NamedTuple):
    """The tied names of a checkpoint."""

    #: Stored name of each further name.
    stored: dict[str, str]
    #: Names that files declare for different tensors.
    contradictory: list[str]
    #: At most one note for the report.
    notes: tuple[str, ...]


def one_file(index: Index, limits: Limits) -> Index:
    """Return the index of a checkpoint of one file, with its tied names and without the places of its chunks.

    Raises:
        UnsupportedError: It holds chunks of tensors.
        FormatError: It describes its chunks in a malformed way.
        LimitError: There are more names, or a longer name, than the limits allow.
    """
    if PLACES in index.metadata:
        index = without_places(index, limits)
    tree, path = index.tree, index.files[0].path
    if not index.tied or not isinstance(tree, dict):
        return index
    ties = find_ties([Declaration(path, tree, index.tied)], {}, path, limits)
    tied = {name: tree[stored] for name, stored in ties.stored.items()}
    return replace(index, tree={**tree, **tied}, tied={}, notes=(*index.notes, *ties.notes))


def find_ties(declarations: Sequence[Declaration], weight_map: Mapping[str, str], path: str, limits: Limits) -> Ties:
    """Return the tied names of a checkpoint.

    Args:
        declarations: What each file stores and declares.
        weight_map: The file of each name, as the index file has it; empty without an index file.
        path: Path of the checkpoint, for error messages.
        limits: Bounds on names.

    Raises:
        LimitError: There are more names, or a longer name, than the limits allow.
    """
    places = {name: each.file for each in reversed(declarations) for name in each.tensors}
    near: dict[str, set[str]] = {}
    far: dict[str, set[str]] = {}
    lost: dict[str, None] = {}
    for _, tensors, tied in declarations:
        for name, stored in tied.items():
            if name in places or (name in weight_map and weight_map[name] != places.get(stored)):
                continue
            if stored in places:
                (near if stored in tensors else far).setdefault(name, set()).add(stored)
            else:
                lost[name] = None
    candidates = {**far, **near}
    total = len(places) + len(candidates)
    check_limit(limits, "entries", total, "the number of stored and tied names", file=path)
    for name in candidates:
        check_limit(limits, "name_bytes", len(name.encode()), "a tied name", file=path, tensor=name[:80])
    found = {name: next(iter(stored)) for name, stored in candidates.items() if len(stored) == 1}
    left_out = [repr(name) for name in lost if name not in candidates]
    why = "Left out, because the tensors that they are tied to are not in the checkpoint"
    notes = (f"{listed(why, left_out)}.",) if left_out else ()
    return Ties(found, [name for name in candidates if name not in found], notes)


class _Place(Struct):
    """The place of a chunk in its tensor."""

    saved_offsets: tuple[int, ...]


def without_places(index: Index, limits: Limits) -> Index:
    """Return the index of a file without the description of its chunks.

    Raises:
        UnsupportedError: A chunk does not start at the first element of its tensor.
        FormatError: The description is malformed.
        LimitError: It has more values than the limits allow.
    """
    path, data = index.files[0].path, index.metadata.get(PLACES, "{}").encode()
    if count_strings(data) > 2 * limits.entries or has_longer_list(without_strings(data), limits.dimensions):
        expected = f"at most {limits.entries}"
        raise LimitError("the description of chunks exceeds the limit 'entries'", file=path, expected=expected)
    for name, place in decode_json(data, dict[str, _Place], "the description of chunks", path).items():
        if any(place.saved_offsets):
            problem = "the file holds a chunk of a tensor, which torch.distributed.checkpoint divided over ranks"
            raise UnsupportedError(
                problem, file=path, tensor=name, found=f"elements from {place.saved_offsets}", advice=_CONSOLIDATE
            )
    metadata = {key: text for key, text in index.metadata.items() if key not in {PLACES, _VERSION}}
    return replace(index, metadata=metadata)
