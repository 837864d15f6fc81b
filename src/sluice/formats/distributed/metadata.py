"""The ``.metadata`` file of a torch.distributed.checkpoint directory: its items and where they are stored.

Layout: a pickle of ``torch.distributed.checkpoint.metadata.Metadata``, with nothing before or after it::

    state_dict_metadata   NAME -> TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()
    chunks                [ChunkStorageMetadata(offsets, sizes), ...]: boxes of the tensor, each stored separately
    storage_data          MetadataIndex(fqn, offset) -> _StorageInfo(relative_path, offset, length)
    planner_data          NAME -> path in the object before torch flattened it; absent in old checkpoints
    version               kept for reports
    storage_meta          not used

The inert unpickler reads it: objects of these classes become ``MetadataRecord`` objects with unchecked fields, and any
global besides them and torch's plain values is refused. This module then checks every field.

Limits: the size of the file (``Limits.header_bytes``), tensors and chunks together (``Limits.entries``),
``Limits.dimensions``, ``Limits.name_bytes``, and the limits of the pickle.

Refused: a chunk outside its tensor or without a stored item; chunks that overlap or leave a gap; files outside the
directory. Ignored: chunks without elements, which uneven shards have,
and stored items without a description. ``UnsupportedValue`` leaves: tensors that are not strided, tensors with a dtype
that sluice does not read, and items that the writer transformed, for example compressed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from reprlib import repr as short_repr
from typing import Any

from msgspec import Struct

from sluice._dtypes import ITEM_BYTES, MAX_SIGNED
from sluice._errors import FormatError, LimitError, PathEscapeError, UnsafeContentError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.entries.slicing import cut_dimensions, first_miscount
from sluice.formats.distributed.metadata_allowlist import BYTES, MetadataAllowlist, MetadataRecord
from sluice.formats.foreign import recognise_placeholder
from sluice.formats.pickles.unpickler import Unpickler
from sluice.formats.protocol import read_whole
from sluice.formats.shard_index import is_plain_path
from sluice.formats.torch_save.plain_values import DTYPE_PREFIX, UNREAD_DTYPE
from sluice.records import Opaque, TorchSize, TorchText, UnsupportedValue, collector_paused
from sluice.sources.protocol import Source

__all__ = ["DistributedMetadata", "ItemPlace", "SavedChunk", "TensorItem", "read_metadata"]

#: Numbers of properties: ``dtype, layout, requires_grad, memory format, pin_memory``, and ``strides`` from torch 2.15
#: on. A chunk is stored with its own strides, so these do not matter here.
_PROPERTIES = (5, 6)

_TRANSFORMED = "an item that was transformed when it was written (for example, compressed)"

#: Maximum number of chunk corners to compare, per entry of ``Limits.entries``. A chunk cut in two dimensions has four.
_CORNERS_PER_ENTRY = 4


class ItemPlace(Struct, frozen=True, kw_only=True):
    """The place of a stored item."""

    #: Path of the file, relative to the directory, with forward slashes.
    file: str
    #: Offset of the item in the file, in bytes.
    offset: int
    #: Size of the item, in bytes.
    nbytes: int
    #: The writer's names of the transforms applied to the item, such as compression; empty if there are none.
    transforms: str = ""


class SavedChunk(Struct, frozen=True, kw_only=True):
    """A box of a tensor that is stored as a separate tensor."""

    #: Index of the first element in the tensor, in each dimension.
    start: tuple[int, ...]
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Place of the stored item.
    place: ItemPlace


class TensorItem(Struct, frozen=True, kw_only=True):
    """A tensor of the checkpoint."""

    #: Flat name.
    name: str
    #: Name of the dtype.
    dtype: str
    #: Size of each dimension, in elements.
    shape: tuple[int, ...]
    #: Boxes that cover each element exactly once; a single box without elements for an empty tensor.
    chunks: tuple[SavedChunk, ...]


class DistributedMetadata(Struct, frozen=True, kw_only=True):
    """The items of a distributed checkpoint, checked against each other."""

    #: Tensors, places of other values, and unsupported tensors, by flat name in file order.
    items: Mapping[str, TensorItem | ItemPlace | UnsupportedValue]
    #: Path of each item in the saved object, by flat name; unchecked. Items may be missing.
    paths: Mapping[str, object]
    #: Version of the format; empty if not declared.
    version: str
    #: Notes for reports, in full sentences.
    notes: tuple[str, ...]


def read_metadata(source: Source, limits: Limits) -> DistributedMetadata:
    """Read a ``.metadata`` file and check that it is consistent.

    Raises:
        IncompleteCheckpointError: The file is the placeholder of a file that was not downloaded.
        UnsafeContentError: The pickle names a global that torch never writes.
        PathEscapeError: An item is stored in a file outside the directory.
        UnsupportedError: The pickle has an unsupported protocol or key.
        LimitError: The metadata exceeds a limit.
        FormatError: The metadata is inconsistent, or the file is not metadata.
        TruncatedError: The file ends too early.
    """
    with collector_paused():
        root = _unpickle(source, limits)
        return _MetadataReader(source.path, limits).read(root)


def _unpickle(source: Source, limits: Limits) -> object:
    data = read_whole(source, limits, "the metadata")
    placeholder = recognise_placeholder(data, source.path)
    if placeholder is not None:
        raise placeholder
    unpickler = Unpickler(data, MetadataAllowlist(limits, len(data)), limits=limits, file=source.path)
    root = unpickler.load()
    for leaf in unpickler.opaque.values():
        raise UnsafeContentError(
            f"the metadata names {leaf.qualified_name}, which torch never writes", file=source.path
        )
    if unpickler.refusal is not None:
        raise unpickler.refusal.error
    if unpickler.end != len(data):
        raise FormatError("bytes follow the pickle of the metadata", file=source.path, offset=unpickler.end)
    return root


class _MetadataReader:
    """Conversion of the unpickled object to ``DistributedMetadata``."""

    def __init__(self, file: str, limits: Limits) -> None:
        self._file = file
        self._limits = limits
        self._chunks = 0
        self._corners_left = _CORNERS_PER_ENTRY * limits.entries
        self._plain: set[str] = set()

    def read(self, root: object) -> DistributedMetadata:
        fields = self._fields(root, "Metadata", "the metadata")
        items = self._dict(fields.get("state_dict_metadata"), "state_dict_metadata")
        stored = self._dict(fields.get("storage_data"), "storage_data")
        check_limit(self._limits, "entries", max(len(items), len(stored)), "the metadata", file=self._file)
        places = self._places(stored)
        described = {name: self._item(name, item, places) for name, item in items.items()}
        paths, version = fields.get("planner_data"), fields.get("version")
        left = sum(map(len, places.values()))
        return DistributedMetadata(
            items=described,
            paths={} if paths is None else self._dict(paths, "planner_data"),
            version=version if type(version) is str else "",
            notes=(f"Items that are stored but not described: {left}.",) if left else (),
        )

    def _places(self, stored: dict[Any, Any]) -> dict[str, dict[str, ItemPlace]]:
        """Return the place of each item, by its name and then by the start of its chunk (see ``_chunk_key``)."""
        places: dict[str, dict[str, ItemPlace]] = {}
        for key, info in stored.items():
            index = self._fields(key, "MetadataIndex", "a key of storage_data")
            name, start = index.get("fqn"), index.get("offset")
            if type(name) is not str:
                raise self._error("a key of storage_data has no name")
            chunk_key = "" if start is None else _chunk_key(self._sizes(start, name, "the offset of a stored chunk"))
            if chunk_key in places.setdefault(name, {}):
                raise self._error("an item is stored twice", name, found=f"chunk at [{chunk_key}]")
            places[name][chunk_key] = self._place(info, name)
        return places

    def _place(self, info: object, name: str) -> ItemPlace:
        fields = self._fields(info, "_StorageInfo", "a value of storage_data", name)
        file, offset, nbytes = (fields.get(field) for field in ("relative_path", "offset", "length"))
        if type(file) is not str or type(offset) is not int or type(nbytes) is not int or min(offset, nbytes) < 0:
            raise self._error(
                "the storage info of an item is malformed", name, expected="a path, an offset and a length"
            )
        if file not in self._plain:
            if not is_plain_path(file):
                problem = "the metadata names a file that is not a plain path under its directory"
                raise PathEscapeError(problem, file=self._file, tensor=name, found=repr(file))
            self._plain.add(file)
        transforms = fields.get("transform_descriptors")
        named = "" if transforms is None or transforms == [] else short_repr(transforms)
        return ItemPlace(file=file, offset=offset, nbytes=nbytes, transforms=named)

    def _item(
        self, name: object, item: object, places: dict[str, dict[str, ItemPlace]]
    ) -> TensorItem | ItemPlace | UnsupportedValue:
        if type(name) is not str:
            raise self._error("the name of an item is not text", found=type(name).__name__)
        stored = places.get(name, {})
        if item is BYTES:
            place = stored.pop("", None)
            if place is None:
                raise self._error("a value has no stored item", name)
            return self._transformed([place]) or place
        fields = self._fields(item, "TensorStorageMetadata", "the description of an item", name)
        shape = self._sizes(fields.get("size"), name, "the size of a tensor")
        dtype = self._dtype(fields.get("properties"), name)
        if isinstance(dtype, UnsupportedValue):
            stored.clear()
            return dtype
        if prod(max(size, 1) for size in shape) * ITEM_BYTES[dtype] > MAX_SIGNED:
            raise self._error("a tensor has more bytes than torch can count", name, found=shape)
        declared = list(self._boxes(fields.get("chunks"), shape, name))
        boxes = declared[:1] if 0 in shape else [(start, sizes) for start, sizes in declared if 0 not in sizes]
        self._check_cover(boxes, shape, name)
        chunks = tuple(self._chunk(start, sizes, stored, name) for start, sizes in boxes)
        for start, _ in declared:
            stored.pop(_chunk_key(start), None)
        transformed = self._transformed([chunk.place for chunk in chunks])
        if transformed is not None:
            return transformed
        return TensorItem(name=name, dtype=dtype, shape=shape, chunks=chunks)

    def _transformed(self, places: Sequence[ItemPlace]) -> UnsupportedValue | None:
        """Return the leaf of an item of which a part was transformed, or None."""
        for place in places:
            if place.transforms:
                return UnsupportedValue(qualified_name=place.transforms, reason=_TRANSFORMED, file=self._file)
        return None

    def _dtype(self, properties: object, name: str) -> str | UnsupportedValue:
        state = (
            properties.state if type(properties) is MetadataRecord and properties.kind == "TensorProperties" else None
        )
        if type(state) is not tuple or len(state) < _PROPERTIES[0]:
            raise self._error("the properties of a tensor are malformed", name)
        if len(state) not in _PROPERTIES:
            problem = f"a tensor with {len(state)} properties, of which sluice knows {_PROPERTIES[-1]}"
            return UnsupportedValue(qualified_name="TensorProperties", reason=problem, file=self._file)
        dtype, layout = state[:2]
        if type(dtype) is Opaque:
            problem = "a tensor of a dtype that sluice does not know"
            return UnsupportedValue(qualified_name=dtype.qualified_name, reason=problem, file=self._file)
        if type(dtype) is not TorchText or not dtype.startswith(DTYPE_PREFIX):
            raise self._error("the dtype of a tensor is not a torch.dtype", name)
        if dtype[len(DTYPE_PREFIX) :] not in ITEM_BYTES:
            return UnsupportedValue(qualified_name=dtype, reason=UNREAD_DTYPE, file=self._file)
        if layout != "torch.strided":
            kind = str(layout) if isinstance(layout, str) else short_repr(layout)
            return UnsupportedValue(qualified_name=kind, reason="a tensor that is not strided", file=self._file)
        return dtype[len(DTYPE_PREFIX) :]

    def _boxes(
        self, chunks: object, shape: tuple[int, ...], name: str
    ) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Yield the start and the size of each chunk."""
        if type(chunks) is not list or not chunks:
            raise self._error("a tensor has no list of chunks", name)
        self._chunks += len(chunks)
        if self._chunks > self._limits.entries:
            check_limit(self._limits, "entries", self._chunks, "the metadata", file=self._file)
        for chunk in chunks:
            fields = self._fields(chunk, "ChunkStorageMetadata", "a chunk", name)
            start = self._sizes(fields.get("offsets"), name, "the offset of a chunk")
            sizes = self._sizes(fields.get("sizes"), name, "the size of a chunk")
            inside = len(start) == len(sizes) == len(shape) and all(
                first + size <= whole for first, size, whole in zip(start, sizes, shape, strict=True)
            )
            if not inside:
                found = f"{list(sizes)} at {list(start)}"
                raise self._error("a chunk extends outside its tensor", name, expected=list(shape), found=found)
            yield start, sizes

    def _check_cover(
        self, boxes: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], shape: tuple[int, ...], name: str
    ) -> None:
        if 0 in shape or boxes == [((0,) * len(shape), shape)]:
            return
        self._corners_left -= len(boxes) << len(cut_dimensions(shape, boxes))
        if self._corners_left < 0:
            problem, expected = "too many corners of chunks for the limit 'entries'", f"at most {self._limits.entries}"
            raise LimitError(problem, file=self._file, tensor=name, expected=expected)
        miscount = first_miscount(shape, boxes)
        if miscount is not None:
            element, count = miscount
            problem = "the chunks of a tensor overlap" if count else "the chunks of a tensor leave a gap"
            found = f"element {list(element)} in {count}"
            raise self._error(problem, name, expected="every element in one chunk", found=found)

    def _chunk(
        self, start: tuple[int, ...], shape: tuple[int, ...], stored: dict[str, ItemPlace], name: str
    ) -> SavedChunk:
        place = stored.pop(_chunk_key(start), None)
        if place is None:
            raise self._error("a chunk has no stored item", name, expected=f"a place for the chunk at {list(start)}")
        return SavedChunk(start=start, shape=shape, place=place)

    def _fields(self, value: object, kind: str, what: str, name: str | None = None) -> dict[str, Any]:
        if type(value) is not MetadataRecord or value.kind != kind or type(value.state) is not dict:
            found = value.kind if type(value) is MetadataRecord else type(value).__name__
            raise self._error(f"{what} is not a {kind}", name, found=found)
        return value.state

    def _dict(self, value: object, field: str) -> dict[Any, Any]:
        if type(value) is not dict:
            raise self._error(f"{field} of the metadata is not a dictionary", found=type(value).__name__)
        return value

    def _sizes(self, value: object, name: str, what: str) -> tuple[int, ...]:
        if type(value) not in (tuple, TorchSize, list):
            raise self._error(f"{what} is not a tuple", name, found=type(value).__name__)
        sizes: tuple[Any, ...] = tuple(value)  # type: ignore[arg-type]  # one of the three types
        if not all(type(size) is int and 0 <= size <= MAX_SIGNED for size in sizes):
            raise self._error(f"{what} contains a value that is not a valid size", name)
        if len(sizes) > self._limits.dimensions:
            raise self._error(f"a tensor has more than {self._limits.dimensions} dimensions", name, found=len(sizes))
        return sizes

    def _error(
        self, problem: str, name: str | None = None, *, expected: object = None, found: object = None
    ) -> FormatError:
        return FormatError(problem, file=self._file, tensor=name, expected=expected, found=found)


def _chunk_key(start: tuple[int, ...]) -> str:
    """Return the start of a chunk as text, whose hashes a file cannot make collide; never empty, even for a scalar."""
    return f"[{','.join(map(str, start))}]"
