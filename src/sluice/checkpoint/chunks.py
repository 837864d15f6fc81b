r"""Shards of torch's ``HuggingFaceStorageWriter(save_distributed=True)``, before they are consolidated.

Layout: each rank writes ``shard-R-model-I-of-N.safetensors`` with its chunks of tensors, under the names of the whole
tensors. ``__metadata__`` has the place of each chunk::

    {"DCP_SHARDING_INFO": "{\"a.weight\": {\"saved_offsets\": [4, 0]}, ...}", "DCP_VERSION": "1.0", "format": "pt"}

The shape of a tensor is stored nowhere. As in torch's reader, it is the smallest shape that holds all chunks, so the
file of a last rank is not missed. There is no file that lists the others, and a rank without data writes none.

A shard that is opened alone must not have chunks from the middle of tensors, which would get the names of the whole
ones.

Limits: ``Limits.entries`` for the objects and lists of the metadata, and for the corners of all chunks together;
``Limits.entries`` times ``Limits.dimensions`` for its values.
Refused: chunks of one tensor that overlap, leave a gap, or differ in dtype or in the number of dimensions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta, Struct
from msgspec.structs import replace

from sluice._errors import FormatError, IncompleteCheckpointError, LimitError
from sluice._options import Limits
from sluice.checkpoint.layout import PLACES
from sluice.formats.distributed.exact_cover import cut_dimensions, first_miscount
from sluice.formats.strict_json import count_strings, decode_json, has_longer_list, without_strings
from sluice.records import NO_STORAGE, Entry, Index, Part, UnsupportedValue
from sluice.records.geometry import contiguous_stride

__all__ = ["ChunkFile", "alone", "assemble_chunks", "plain_metadata"]

#: Further key of the metadata that describes chunks.
_VERSION = "DCP_VERSION"

#: Note for the report.
_SHAPES = "The shapes of the tensors follow from their chunks; the files do not state them."

_ALL_SHARDS = (
    "The other chunks are in the shards of other ranks: pass the directory, or all shards as a list. If the file holds "
    f"whole tensors, its metadata was copied: remove {PLACES!r}."
)

_MAX_SIGNED = 2**63 - 1


class ChunkFile(NamedTuple):
    """The chunks of one file."""

    #: Path of the file, for messages.
    path: str
    #: Its metadata.
    metadata: Mapping[str, str]
    #: Its chunks, by the names of their tensors.
    chunks: Mapping[str, object]


class _Place(Struct):
    """The place of a chunk in its tensor."""

    saved_offsets: tuple[Annotated[int, Meta(ge=0, le=_MAX_SIGNED)], ...]


class _Chunk(NamedTuple):
    entry: Entry
    start: tuple[int, ...]
    path: str


def plain_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return metadata without the items that describe chunks."""
    return {key: text for key, text in metadata.items() if key not in {PLACES, _VERSION}}


def alone(index: Index, limits: Limits) -> Index:
    """Return the index of a shard that is not merged with others.

    Raises:
        IncompleteCheckpointError: It holds chunks from the middle of tensors.
        FormatError: The metadata is malformed.
        LimitError: The metadata has more values than the limits allow.
    """
    path, tree = index.files[0].path, index.tree
    places = _read_places(index.metadata, path, limits)
    for name, entry in tree.items() if isinstance(tree, dict) else ():
        start = _start(places, name, entry, path) if isinstance(entry, Entry) else ()
        if any(start):
            raise IncompleteCheckpointError(
                "the file holds a chunk of a tensor, without the chunks before it",
                file=path,
                tensor=name,
                expected="a chunk that starts at the first element",
                found=f"one that starts at {list(start)}",
                advice=_ALL_SHARDS,
            )
    return replace(index, metadata=plain_metadata(index.metadata), notes=(*index.notes, _SHAPES))


def assemble_chunks(files: Sequence[ChunkFile], limits: Limits) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return the whole tensors by name, and notes for the report.

    Raises:
        IncompleteCheckpointError: The chunks of a tensor leave a gap.
        FormatError: The metadata is malformed, or the chunks of a tensor contradict each other.
        LimitError: There are more chunks, or more corners of chunks, than the limits allow.
    """
    chunks: defaultdict[str, list[_Chunk]] = defaultdict(list)
    tree: dict[str, object] = {}
    for path, metadata, own in files:
        places = _read_places(metadata, path, limits)
        for name, entry in own.items():
            tree.setdefault(name, entry)
            if isinstance(entry, UnsupportedValue):
                tree[name] = entry
            elif isinstance(entry, Entry):
                chunks[name].append(_Chunk(entry, _start(places, name, entry, path), path))
    corners_left = limits.entries
    cut = 0
    for name, found in chunks.items():
        if not isinstance(tree[name], Entry):
            continue
        shape, some = _shape(name, found)
        boxes = [(chunk.start, chunk.entry.shape) for chunk in some]
        corners_left -= len(boxes) << len(cut_dimensions(shape, boxes)) if len(boxes) > 1 else 1
        if corners_left < 0:
            problem = "the chunks of all tensors have more corners than the limit 'entries'"
            raise LimitError(problem, file=some[0].path, tensor=name, expected=f"at most {limits.entries}")
        tree[name] = _assemble(name, shape, some)
        cut += len(some) > 1
    notes = [f"Tensors that are assembled from chunks: {cut}, of {sum(map(len, chunks.values()))} chunks."] * bool(cut)
    return tree, (*notes, _SHAPES)


def _read_places(metadata: Mapping[str, str], path: str, limits: Limits) -> Mapping[str, _Place] | None:
    """Return the place of each name in the description of chunks; None if there is no description."""
    text = metadata.get(PLACES)
    if text is None:
        return None
    data = text.encode()
    if count_strings(data) > 2 * limits.entries or has_longer_list(without_strings(data), limits.dimensions):
        raise LimitError(
            "the places of chunks exceed the limit 'entries'", file=path, expected=f"at most {limits.entries}"
        )
    places = decode_json(data, dict[str, _Place], "the description of chunks", path)
    if count_strings(data) != 2 * len(places):
        raise FormatError("the place of a chunk is given twice", file=path)
    return places


def _start(places: Mapping[str, _Place] | None, name: str, entry: Entry, path: str) -> tuple[int, ...]:
    """Return the index of the first element of a chunk in its tensor."""
    if places is None:
        return (0,) * len(entry.shape)
    start = places[name].saved_offsets if name in places else ()
    sizes = entry.shape
    if len(start) != len(sizes) or any(first > _MAX_SIGNED - size for first, size in zip(start, sizes, strict=True)):
        raise FormatError(
            "a chunk has no valid place in its tensor",
            file=path,
            tensor=name,
            expected=f"saved_offsets: {len(sizes)} integers",
            found=list(start),
        )
    return start


def _shape(name: str, chunks: Sequence[_Chunk]) -> tuple[tuple[int, ...], list[_Chunk]]:
    """Return the shape of a tensor and its chunks, without empty chunks of a tensor that is not empty."""
    first = chunks[0]
    for chunk in chunks:
        if (chunk.entry.dtype, len(chunk.start)) != (first.entry.dtype, len(first.start)):
            raise FormatError(
                "the chunks of a tensor differ in dtype or number of dimensions",
                file=chunk.path,
                tensor=name,
                expected=f"{first.entry.dtype} {list(first.entry.shape)}",
                found=f"{chunk.entry.dtype} {list(chunk.entry.shape)}",
            )
    filled = [chunk for chunk in chunks if chunk.entry.numel]
    ends = [[at + size for at, size in zip(each.start, each.entry.shape, strict=True)] for each in filled or chunks]
    return tuple(map(max, zip(*ends, strict=True))), filled or [first]


def _assemble(name: str, shape: tuple[int, ...], chunks: Sequence[_Chunk]) -> Entry:
    first = chunks[0]
    if 0 in shape or (len(chunks) == 1 and first.entry.shape == shape):
        return replace(first.entry, shape=shape, stride=contiguous_stride(shape))
    miscount = first_miscount(shape, [(chunk.start, chunk.entry.shape) for chunk in chunks])
    if miscount is not None:
        expected = "every element in one chunk"
        found = f"element {list(miscount.element)} in {miscount.boxes} of {len(chunks)} chunks"
        if miscount.boxes:
            problem = "the chunks of a tensor overlap"
            raise FormatError(problem, file=first.path, tensor=name, expected=expected, found=found)
        problem = "the chunks of a tensor leave a gap"
        raise IncompleteCheckpointError(
            problem, file=first.path, tensor=name, expected=expected, found=found, advice=_ALL_SHARDS
        )
    parts = tuple(Part(entry=chunk.entry, start=chunk.start) for chunk in chunks)
    return replace(first.entry, shape=shape, stride=contiguous_stride(shape), storage=NO_STORAGE, parts=parts)
