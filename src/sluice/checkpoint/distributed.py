"""Directories written by torch.distributed.checkpoint, read without a process group.

Layout::

    .metadata        all items and their places (``formats.distributed.metadata``); written last, as .metadata.tmp first
    __R_N.distcp     the items that rank R wrote, one after the other (``formats.distributed.items``)

A tensor is stored in chunks, in any of the files. A chunk that covers the whole tensor becomes an ordinary entry;
several chunks become one entry that is assembled from them. The tree has the nesting of the saved object.

Opening a directory reads the metadata, the values that are not tensors and the first bytes of each chunk
(``checkpoint.distributed_files``). Where requests are expensive, it reads all of each chunk but its data, so that no
further request is needed for headers.

Limits: the length of the path of an item (``Limits.depth``), and the total length of all lists (``Limits.entries``).

Refused: everything that these modules refuse; missing files; chunks whose dtype or shape differs from the
metadata. Values that only running code could build become placeholders with their names, as in a ``torch.save`` file.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import FormatError
from sluice._messages import check_limit
from sluice._options import Limits
from sluice.checkpoint.distributed_files import DataFiles, ListedItem
from sluice.checkpoint.merging import renumbered
from sluice.checkpoint.open_file import METADATA_FILE, CheckpointLayout, OpenFile
from sluice.formats.distributed.items import ChunkHeader, Item, ItemFile, ItemStorage
from sluice.formats.distributed.metadata import DistributedMetadata, ItemPlace, TensorItem, read_metadata
from sluice.records import (
    NO_STORAGE,
    Entry,
    FileRecord,
    Index,
    Part,
    Storage,
    UnsupportedValue,
    collector_paused,
    row_major,
)
from sluice.sources.protocol import Source

__all__ = ["open_distributed"]

_NAME = "torch-distributed"


def open_distributed(layout: CheckpointLayout, limits: Limits) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open a directory of torch.distributed.checkpoint; reads no tensor data.

    Returns:
        The index of the checkpoint, and its files in the order of ``Index.files``.

    Raises:
        CheckpointError: The metadata or a file is damaged, unsafe or of a kind that sluice does not read.
        ReadError: A file cannot be read.
    """
    (metadata,) = layout.files
    if not limits.symlinks_outside:
        layout.directory.check_inside(metadata)
    with closing(layout.directory.open(metadata)) as source:
        contents = read_metadata(source, limits)
    files = _items_by_file(contents, metadata.removesuffix(METADATA_FILE))
    check_limit(limits, "files", len(files), "the metadata", file=source.path)
    members = DataFiles(layout.directory, limits)
    try:
        members.open(files)
        return _IndexBuilder(source.path, limits, members).build(contents, layout, files, members.headers(files))
    except BaseException:
        members.close()
        raise


def _items_by_file(contents: DistributedMetadata, below: str) -> dict[str, list[ListedItem]]:
    """Return the items of each file, sorted by offset; the files ``below`` a path, sorted by name."""
    files: defaultdict[str, list[ListedItem]] = defaultdict(list)
    for name, value in contents.items.items():
        if isinstance(value, UnsupportedValue):
            continue
        if isinstance(value, ItemPlace):
            files[value.file].append(ListedItem(Item(name=name, offset=value.offset, nbytes=value.nbytes), None, None))
            continue
        for chunk in value.chunks:
            title = value.name if len(value.chunks) == 1 else f"{value.name}[{', '.join(map(str, chunk.start))}]"
            item = Item(name=title, offset=chunk.place.offset, nbytes=chunk.place.nbytes)
            files[chunk.place.file].append(ListedItem(item, value, chunk))
    return {below + file: sorted(files[file], key=lambda listed: listed.item.offset) for file in sorted(files)}


class _ItemFileRecords(Struct):
    """The storages of one file, collected while it is indexed."""

    #: Position of its first storage in the index.
    first: int
    #: Its storages, and for each the item that holds it.
    storages: list[Storage]
    owned: list[ItemStorage]


class _IndexBuilder:
    """Builds the index file by file, and item by item within a file."""

    def __init__(self, path: str, limits: Limits, members: DataFiles) -> None:
        self._path = path
        self._limits = limits
        self._members = members
        self._files: list[_ItemFileRecords] = []
        self._count = 0
        #: The entry of each chunk, by the chunk's identity; the tree of each value, by name.
        self._entries: dict[int, Entry | UnsupportedValue] = {}
        self._values: dict[str, object] = {}
        #: Notes about the values, without duplicates.
        self._notes: dict[str, None] = {}

    def build(
        self,
        contents: DistributedMetadata,
        layout: CheckpointLayout,
        files: Mapping[str, Sequence[ListedItem]],
        headers: Sequence[Sequence[ChunkHeader]],
    ) -> tuple[Index, tuple[OpenFile, ...]]:
        """Return the index of all files, and the files.

        Args:
            contents: The metadata.
            layout: The directory.
            files: Items of each file, sorted by offset.
            headers: Headers of the chunks of each file that have elements.
        """
        with collector_paused():
            for source, items, own in zip(self._members.sources, files.values(), headers, strict=True):
                self._add_file(source, items, own)
            return self._finish(contents, layout)

    def _add_file(self, source: Source, listed: Sequence[ListedItem], headers: Sequence[ChunkHeader]) -> None:
        self._files.append(_ItemFileRecords(self._count, [], []))
        following = iter(headers)
        for each in listed:
            if each.tensor is None:
                self._add_value(each.item)
                continue
            assert each.chunk is not None
            if not each.filled:
                storage = self._add_storage(each.item, None, 0, 0, offset=each.item.offset, located=True)
                entry = row_major(each.tensor.dtype, each.tensor.shape, storage)
            else:
                inner, nbytes, offset = next(following)
                if isinstance(inner, UnsupportedValue):
                    self._entries[id(each.chunk)] = inner
                    continue
                self._check_chunk(inner, each, source)
                known = offset is not None
                place = each.item.offset if offset is None else offset
                storage = self._add_storage(each.item, inner, inner.storage, nbytes, offset=place, located=known)
                entry = replace(inner, storage=storage)
            self._entries[id(each.chunk)] = entry

    def _finish(self, contents: DistributedMetadata, layout: CheckpointLayout) -> tuple[Index, tuple[OpenFile, ...]]:
        sources = self._members.sources
        values = {
            name: self._values[name] if isinstance(item, ItemPlace) else self._tensor(item)
            for name, item in contents.items.items()
        }
        tree = _unflatten(values, contents.paths, self._limits, self._path)
        tensors = [item for item in contents.items.values() if isinstance(item, TensorItem)]
        counts = [len(item.chunks) for item in tensors if len(item.chunks) > 1]
        note = f"Tensors that are assembled from chunks: {len(counts)}, of {sum(counts)} chunks."
        index = Index(
            format=_NAME,
            files=tuple(FileRecord(path=source.path, identity=source.identity) for source in sources),
            storages=tuple(storage for file in self._files for storage in file.storages),
            tree=tree,
            metadata={"version": contents.version} if contents.version else {},
            notes=(*layout.notes, *contents.notes, *([note] if counts else ()), *self._notes),
        )
        return index, tuple(map(self._open_file, index.files, sources, self._files))

    def _add_value(self, item: Item) -> None:
        inner = self._members.values[item.name]
        first = self._count
        for number, storage in enumerate(inner.storages):
            self._add_storage(item, None, number, storage.nbytes, offset=item.offset + storage.offset)
        self._notes.update(dict.fromkeys(inner.notes))
        self._values[item.name] = renumbered(inner.tree, by=first)

    def _add_storage(
        self, item: Item, entry: Entry | None, number: int, nbytes: int, *, offset: int, located: bool = False
    ) -> int:
        file = self._files[-1]
        file.owned.append(ItemStorage(item=item, entry=entry, position=number, nbytes=nbytes))
        key = item.name if entry is not None or located else f"{item.name}/{number}"
        position = len(self._files) - 1
        file.storages.append(Storage(file=position, offset=offset, nbytes=nbytes, key=key, located=located))
        self._count += 1
        if self._count > self._limits.entries:
            check_limit(self._limits, "entries", self._count, "the number of storages in all files", file=self._path)
        return self._count - 1

    def _check_chunk(self, inner: Entry, listed: ListedItem, source: Source) -> None:
        assert listed.tensor is not None
        assert listed.chunk is not None
        if (inner.dtype, inner.shape) != (listed.tensor.dtype, listed.chunk.shape):
            raise FormatError(
                "an item does not hold the tensor that the metadata describes",
                file=source.path,
                tensor=listed.item.name,
                offset=listed.item.offset,
                expected=f"{listed.tensor.dtype} {list(listed.chunk.shape)}",
                found=f"{inner.dtype} {list(inner.shape)}",
            )

    def _tensor(self, tensor: TensorItem | UnsupportedValue) -> Entry | UnsupportedValue:
        """Return the entry of a tensor.

        A single chunk that is a conjugate or negative view is assembled as well: torch copies chunks, so that what it
        loads is never a view.
        """
        if isinstance(tensor, UnsupportedValue):
            return tensor
        parts = []
        for chunk in tensor.chunks:
            entry = self._entries[id(chunk)]
            if isinstance(entry, UnsupportedValue) or (len(tensor.chunks) == 1 and not entry.elements.computed):
                return entry
            parts.append(Part(entry=entry, start=chunk.start))
        return row_major(tensor.dtype, tensor.shape, NO_STORAGE, tuple(parts))

    def _open_file(self, record: FileRecord, source: Source, file: _ItemFileRecords) -> OpenFile:
        own = Index(format=_NAME, files=(record,), storages=tuple(file.storages), tree=None)
        locator = ItemFile(self._members.reader, file.owned)
        return OpenFile(source=source, locator=locator, index=own, first_storage=file.first)


class _Dict(dict[Any, Any]):
    """A dict on the path of an item, as opposed to a dict that is the value of an item."""


class _List(dict[Any, Any]):
    """A list on the path of an item, by position."""


def _unflatten(
    values: Mapping[str, object], paths: Mapping[str, object], limits: Limits, file: str
) -> dict[str, object]:
    """Return the nested object.

    torch flattens the object on saving: ``{"optim": {"state": {0: {"step": t}}}}`` becomes the item
    ``optim.state.0.step`` with the path ``("optim", "state", "0", "step")``. In a path, dict keys are text and list
    positions are integers. An item without a path is at the top level under its name. Empty containers are lost, and
    missing list positions are None, as in torch.

    Args:
        values: Value of each item, by flat name.
        paths: Path of each item, by flat name; items may be missing.
        limits: Bounds on depth and length.
        file: Path of the file that holds the paths, for error messages.

    Raises:
        FormatError: A path has invalid components, or two paths conflict.
        LimitError: The object is deeper or longer than the limits allow.
    """
    root: dict[str, Any] = _Dict()
    containers: list[tuple[Any, object, Any]] = []
    for name, value in values.items():
        path = _checked_path(name, paths.get(name, (name,)), limits, file)
        container = root
        for key, following in pairwise(path):
            kind = _List if type(following) is int else _Dict
            if key not in container:
                container[key] = kind()
                containers.append((container, key, container[key]))
            container = container[key]
            if type(container) is not kind:
                raise FormatError("the paths of two items conflict", file=file, tensor=name, found=path)
        if path[-1] in container:
            raise FormatError("the paths of two items conflict", file=file, tensor=name, found=path)
        container[path[-1]] = value
    total = sum(max(container) + 1 for _, _, container in containers if type(container) is _List)
    check_limit(limits, "entries", total, "the length of all lists of the checkpoint", file=file)
    for parent, key, container in reversed(containers):  # inner containers follow outer ones in the list
        positions = range(max(container) + 1) if type(container) is _List else ()
        parent[key] = [container.get(position) for position in positions] if positions else dict(container)
    return dict(root)


def _checked_path(name: str, path: object, limits: Limits, file: str) -> tuple[Any, ...]:
    if type(path) not in (tuple, list) or not path:
        raise FormatError("the path of an item is not a tuple", file=file, tensor=name)
    assert isinstance(path, (tuple, list))
    if len(path) > limits.depth:
        check_limit(limits, "depth", len(path), "the nesting of an item", file=file, tensor=name)
    for key in path:
        if type(key) is not str and (type(key) is not int or key < 0):
            problem = "the path of an item has a component that is neither text nor a list position"
            raise FormatError(problem, file=file, tensor=name)
    if type(path[0]) is not str:
        raise FormatError("the path of an item starts with a list position", file=file, tensor=name)
    if ".".join(map(str, path)) != name:
        raise FormatError("the path of an item does not match its name", file=file, tensor=name, found=path)
    return tuple(path)
