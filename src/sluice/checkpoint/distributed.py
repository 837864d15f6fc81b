"""Directories written by torch.distributed.checkpoint, read without a process group.

Layout::

    .metadata        all items and their places (``formats.distributed.metadata``); written last, as .metadata.tmp first
    __R_N.distcp     the items that rank R wrote, one after the other (``formats.distributed.items``)

A tensor is stored in chunks, in any of the files. A chunk that covers the whole tensor becomes an ordinary entry;
several chunks become one entry that is assembled from them. The tree has the nesting of the saved object
(``formats.distributed.unflatten``).

Opening a directory reads the metadata, the values that are not tensors and the first bytes of each chunk.

Refused: everything that these three modules refuse; missing files; chunks whose dtype or shape differs from the
metadata. Values that only running code could build become placeholders with their names, as in a ``torch.save`` file.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import FormatError, IncompleteCheckpointError, LimitError
from sluice._geometry import contiguous_stride
from sluice._messages import SHOWN, section
from sluice._options import Limits
from sluice.checkpoint.merging import moved
from sluice.checkpoint.names import METADATA_FILE
from sluice.checkpoint.open_file import OpenFile
from sluice.checkpoint.survey import CheckpointLayout, open_member
from sluice.entries import tree as trees
from sluice.formats.distributed.items import Item, ItemFile, ItemReader, ItemStorage, check_items
from sluice.formats.distributed.metadata import DistributedMetadata, ItemPlace, SavedChunk, TensorItem, read_metadata
from sluice.formats.distributed.unflatten import unflatten
from sluice.records import NO_STORAGE, Entry, FileRecord, Index, Part, Storage, UnsupportedValue, elements_of
from sluice.records.bulk import collector_paused
from sluice.sources.directory import Directory
from sluice.sources.protocol import Source

__all__ = ["open_distributed"]

_NAME = "torch-distributed"

#: Bytes of an item besides its data and its pickle; slightly more than torch writes.
_RECORDS_BYTES = 2048


def open_distributed(layout: CheckpointLayout, limits: Limits) -> tuple[Index, tuple[OpenFile, ...]]:
    """Open a directory of torch.distributed.checkpoint; reads no tensor data.

    Returns:
        The index of the checkpoint, and its files in the order of ``Index.files``.

    Raises:
        CheckpointError: The metadata or a file is damaged, unsafe or of a kind that sluice does not read.
        ReadError: A file cannot be read.
    """
    if not limits.symlinks_outside:
        layout.directory.check_inside(METADATA_FILE)
    with closing(layout.directory.open(METADATA_FILE)) as source:
        path = source.path
        contents = read_metadata(source, limits)
    files = _items_by_file(contents)
    if len(files) > limits.files:
        expected = f"at most {limits.files}"
        raise LimitError("the metadata exceeds the limit 'files'", file=path, expected=expected, found=len(files))
    sources = _open_sources(layout.directory, list(files), limits)
    try:
        with collector_paused():
            builder = _IndexBuilder(path, limits)
            for source, items in zip(sources, files.values(), strict=True):
                builder.add_file(source, items)
            return builder.finish(contents, layout, sources)
    except BaseException:
        for source in sources:
            source.close()
        raise


class _ListedItem(NamedTuple):
    """An item, and the tensor and chunk that it holds; None for a value that is not a tensor."""

    item: Item
    tensor: TensorItem | None
    chunk: SavedChunk | None


def _items_by_file(contents: DistributedMetadata) -> dict[str, list[_ListedItem]]:
    """Return the items of each file, sorted by offset; the files sorted by name."""
    files: defaultdict[str, list[_ListedItem]] = defaultdict(list)
    for name, value in contents.items.items():
        if isinstance(value, UnsupportedValue):
            continue
        if isinstance(value, ItemPlace):
            files[value.file].append(_ListedItem(Item(name=name, offset=value.offset, nbytes=value.nbytes), None, None))
            continue
        for chunk in value.chunks:
            item = Item(name=_chunk_name(value, chunk), offset=chunk.place.offset, nbytes=chunk.place.nbytes)
            files[chunk.place.file].append(_ListedItem(item, value, chunk))
    return {file: sorted(files[file], key=lambda listed: listed.item.offset) for file in sorted(files)}


def _chunk_name(tensor: TensorItem, chunk: SavedChunk) -> str:
    return tensor.name if len(tensor.chunks) == 1 else f"{tensor.name}[{', '.join(map(str, chunk.start))}]"


def _open_sources(directory: Directory, files: Sequence[str], limits: Limits) -> list[Source]:
    sources: list[Source] = []
    missing: list[str] = []
    for file in files:
        source = open_member(directory, file, limits)
        if source is None:
            missing.append(file)
        else:
            sources.append(source)
    if missing:
        lines = section("missing files", [repr(file) for file in missing[:SHOWN]], missing)
        text = f"files named in the metadata do not exist\n{lines}\nNothing was read"
        raise FormatError(text, file=directory.path, advice=IncompleteCheckpointError.advice)
    return sources


class _ItemFileRecords(Struct):
    """The storages of one file, collected while it is indexed."""

    #: Position of its first storage in the index.
    first: int
    #: Its storages, and for each the item that holds it.
    storages: list[Storage]
    owned: list[ItemStorage]


class _IndexBuilder:
    """Builds the index file by file, and item by item within a file."""

    def __init__(self, path: str, limits: Limits) -> None:
        self._path = path
        self._limits = limits
        self._reader = ItemReader(limits)
        self._header_bytes_left = limits.header_bytes
        self._files: list[_ItemFileRecords] = []
        self._count = 0
        #: The entry of each chunk, by the chunk's identity; the tree of each value, by name.
        self._entries: dict[int, Entry | UnsupportedValue] = {}
        self._values: dict[str, object] = {}
        #: Notes about the values, without duplicates.
        self._notes: dict[str, None] = {}

    def add_file(self, source: Source, listed: Sequence[_ListedItem]) -> None:
        """Add the items of the next file, sorted by offset."""
        check_items(source, [each.item for each in listed])
        self._files.append(_ItemFileRecords(self._count, [], []))
        chunks = [each for each in listed if each.tensor is not None and 0 not in each.tensor.shape]
        headers = iter(self._reader.chunks(source, [each.item for each in chunks]))
        for each in listed:
            if each.tensor is None:
                self._add_value(source, each.item)
                continue
            assert each.chunk is not None
            if 0 in each.tensor.shape:
                storage = self._add_storage(each.item, None, 0, 0, offset=each.item.offset, located=True)
                entry = _whole(each.tensor, storage=storage)
            else:
                inner, nbytes = next(headers)
                if isinstance(inner, UnsupportedValue):
                    self._entries[id(each.chunk)] = inner
                    continue
                self._check_chunk(inner, each, source)
                storage = self._add_storage(each.item, inner, inner.storage, nbytes, offset=each.item.offset)
                entry = replace(inner, storage=storage)
            self._entries[id(each.chunk)] = entry

    def finish(
        self, contents: DistributedMetadata, layout: CheckpointLayout, sources: Sequence[Source]
    ) -> tuple[Index, tuple[OpenFile, ...]]:
        """Return the index of all files, and the files."""
        values = {
            name: self._values[name] if isinstance(item, ItemPlace) else self._tensor(item)
            for name, item in contents.items.items()
        }
        tree = unflatten(values, contents.paths, self._limits, self._path)
        index = Index(
            format=_NAME,
            files=tuple(FileRecord(path=source.path, identity=source.identity) for source in sources),
            storages=tuple(storage for file in self._files for storage in file.storages),
            tree=tree,
            metadata={"version": contents.version} if contents.version else {},
            notes=(*layout.notes, *contents.notes, *_chunk_note(contents.items), *self._notes),
        )
        return index, tuple(map(self._open_file, index.files, sources, self._files))

    def _add_value(self, source: Source, item: Item) -> None:
        inner = self._reader.value(
            source, item, dataclasses.replace(self._limits, header_bytes=self._header_bytes_left)
        )
        rest = item.nbytes - sum(storage.nbytes for storage in inner.storages) - _RECORDS_BYTES
        self._header_bytes_left = max(0, self._header_bytes_left - max(0, rest))
        first = self._count
        for number, storage in enumerate(inner.storages):
            self._add_storage(item, None, number, storage.nbytes, offset=item.offset + storage.offset)
        self._notes.update(dict.fromkeys(inner.notes))
        self._values[item.name] = trees.map_leaves(inner.tree, partial(moved, by=first))

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
            expected = f"at most {self._limits.entries}"
            raise LimitError("the files together exceed the limit 'entries'", file=self._path, expected=expected)
        return self._count - 1

    def _check_chunk(self, inner: Entry, listed: _ListedItem, source: Source) -> None:
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
            if isinstance(entry, UnsupportedValue) or (len(tensor.chunks) == 1 and not entry.math_bits):
                return entry
            parts.append(Part(entry=entry, start=chunk.start))
        return replace(_whole(tensor, storage=NO_STORAGE), parts=tuple(parts))

    def _open_file(self, record: FileRecord, source: Source, file: _ItemFileRecords) -> OpenFile:
        own = Index(format=_NAME, files=(record,), storages=tuple(file.storages), tree=None)
        locator = ItemFile(self._reader, file.owned)
        return OpenFile(source=source, locator=locator, index=own, first_storage=file.first)


def _whole(tensor: TensorItem, *, storage: int) -> Entry:
    return Entry(
        elements=elements_of(tensor.dtype), shape=tensor.shape, stride=contiguous_stride(tensor.shape), storage=storage
    )


def _chunk_note(items: Mapping[str, object]) -> tuple[str, ...]:
    counts = [len(item.chunks) for item in items.values() if isinstance(item, TensorItem) and len(item.chunks) > 1]
    return (f"Tensors that are assembled from chunks: {len(counts)}, of {sum(counts)} chunks.",) if counts else ()
