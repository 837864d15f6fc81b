"""The data files of a torch.distributed.checkpoint directory: concatenated ``torch.save`` files, one for each item.

Each item is parsed by ``TorchZipFormat`` in a section of its file. The item of a chunk holds one tensor; the item of a
value holds any object, which may contain tensors.

Opening a checkpoint parses values in full but reads only the first bytes of each chunk, because only they hold its
stride. Neighboring heads are read together. The records before the data, up to the end of data.pkl, are identical for
all chunks of one dtype, shape and stride, so only the first chunk of each kind is parsed. ``locate`` parses the item of
a chunk in full and compares it with these results before any data is read. Where requests are expensive,
``ItemReader.located`` parses all items in full at once, so that each is read once.

Limits: those of ``torch_save.zip_format`` for each item. Refused: items that overlap or extend past the end of their
file, items that are not ``torch.save`` files, big-endian items, and data files in safetensors format.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from sluice._errors import CheckpointError, FormatError, UnsafeContentError, UnsupportedError
from sluice._options import Limits
from sluice.formats.detection import is_safetensors, is_torch_zip
from sluice.formats.foreign import recognise_placeholder
from sluice.formats.protocol import Checksum
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.records import Entry, Index, Opaque, UnsupportedValue
from sluice.sources.protocol import Source
from sluice.sources.ranges import read_ranges
from sluice.sources.wrappers import Section

__all__ = ["ChunkHeader", "Item", "ItemFile", "ItemReader", "ItemStorage", "check_items"]

AnyItem = TypeVar("AnyItem")

#: Bytes read at the start of each item for its dtype, shape and stride. Items written by torch need about 300.
_HEAD_BYTES = 1024

#: Bytes read at the end of each item for its central directory. Items written by torch need about 900.
_TAIL_BYTES = 2048

#: Bytes of items that are read together.
_TOGETHER_BYTES = 1 << 20

#: Size of an empty zip archive, in bytes.
_MIN_ITEM_BYTES = 22

#: Bytes at the start of a file that identify its format.
_START_BYTES = 64

#: Maximum number of cached kinds of chunks, and of cached pickles. Models have many tensors of few shapes.
_MAX_CACHED = 4096

#: Signature of the data descriptor, which follows a record whose local header does not hold its sizes.
_DESCRIPTOR = b"PK\7\x08"


class Item(Struct, frozen=True, kw_only=True):
    """One item of a data file."""

    #: Name, followed by the start of the chunk if the tensor has several; for messages and storage keys.
    name: str
    #: Offset in the file, in bytes.
    offset: int
    #: Size, in bytes.
    nbytes: int


class ChunkHeader(NamedTuple):
    """Description of the tensor of a chunk in its item."""

    #: The tensor, as an entry of the item's own index; ``UnsupportedValue`` if sluice cannot assemble it.
    entry: Entry | UnsupportedValue
    #: Size of its storage, in bytes.
    nbytes: int
    #: Offset of the data in the file, in bytes; None if it is not known yet.
    offset: int | None


class ItemStorage(Struct, frozen=True, kw_only=True):
    """A storage of a data file, as a storage of one of its items."""

    #: The item.
    item: Item
    #: The tensor expected in a chunk, as an entry of the item's own index; None for a value, which was parsed in full.
    entry: Entry | None
    #: Position of the storage in the index of the item.
    position: int
    #: Size of the data, in bytes.
    nbytes: int


def check_items(source: Source, items: Sequence[Item]) -> None:
    """Check the places of all items of a file, sorted by offset.

    Raises:
        UnsupportedError: The file has the safetensors format.
        IncompleteCheckpointError: The file is the placeholder of a file that was not downloaded.
        FormatError: An item extends past the end of the file, overlaps another item, or is too short.
    """
    size = source.identity.nbytes
    start = source.read_at(0, min(_START_BYTES, size))
    placeholder = recognise_placeholder(start, source.path)
    if placeholder is not None:
        raise placeholder
    if is_safetensors(start):
        problem = "this distributed checkpoint stores its data as safetensors, which sluice does not read"
        raise UnsupportedError(problem, file=source.path)
    end = 0
    for item in items:
        if item.offset < end:
            problem = "an item overlaps the previous item"
            raise _error(problem, source, item, expected=f"byte {end} or later", found=f"byte {item.offset}")
        end = item.offset + item.nbytes
        if end > size:
            problem = "an item extends past the end of its file, which is truncated or the wrong file"
            raise _error(problem, source, item, expected=f"at least {end} bytes", found=f"{size} bytes")
        if item.nbytes < _MIN_ITEM_BYTES:
            raise _error("an item is too short to be a torch.save file", source, item, found=f"{item.nbytes} bytes")


class ItemReader:
    """Parser of the items in all files of one checkpoint; caches parts that many items share."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._format = TorchZipFormat(max_cached=_MAX_CACHED, whole_objects=True)
        self._chunks: dict[bytes, ChunkHeader] = {}

    def located(self, source: Source, items: Sequence[Item]) -> list[ChunkHeader]:
        """Parse the items of chunks in full.

        The end of an item and the start of the next one share a request.

        Args:
            source: File of the items.
            items: Items of chunks, sorted by offset.

        Raises:
            CheckpointError: An item is not a ``torch.save`` file of one tensor.
        """
        headers: list[ChunkHeader] = []
        for batch in _batches(items):
            for item, known in zip(batch, _read_ends(source, batch), strict=True):
                section, index = self.parse(source, item, self._limits, known)
                entry = _tensor(index, source, item)
                if isinstance(entry, UnsupportedValue):
                    headers.append(ChunkHeader(entry, 0, None))
                    continue
                with _errors_in_file(item):
                    offset = self._format.locate(section, index, [entry.storage])[entry.storage]
                headers.append(ChunkHeader(entry, index.storages[entry.storage].nbytes, section.start + offset))
        return headers

    def chunks(self, source: Source, items: Sequence[Item]) -> list[ChunkHeader]:
        """Read the first bytes of each item; return its tensor, whose data is not located yet.

        Args:
            source: File of the items.
            items: Items of chunks, sorted by offset.

        Raises:
            CheckpointError: An item is not a ``torch.save`` file of one tensor.
        """
        chunks: list[ChunkHeader] = []
        for batch in _batches(items):
            sizes = [min(_HEAD_BYTES, item.nbytes) for item in batch]
            heads = read_ranges(source, [item.offset for item in batch], sizes)
            chunks += [self._chunk(source, item, head) for item, head in zip(batch, heads, strict=True)]
        return chunks

    def _chunk(self, source: Source, item: Item, head: bytes) -> ChunkHeader:
        # What the tensor follows from, up to the end of data.pkl; empty if the item is not that of torch.
        kind = head[: head.find(_DESCRIPTOR) + 1]
        chunk = self._chunks.get(kind)
        if chunk is None:
            _, index = self.parse(source, item, self._limits, [(0, head)])
            entry = _tensor(index, source, item)
            if isinstance(entry, UnsupportedValue):
                return ChunkHeader(entry, 0, None)
            chunk = ChunkHeader(entry, index.storages[entry.storage].nbytes, None)
            if kind and len(self._chunks) < _MAX_CACHED:
                self._chunks[kind] = chunk
        return chunk

    def offsets(
        self, source: Source, item: Item, known: Iterable[tuple[int, bytes]], expected: Sequence[ItemStorage]
    ) -> list[int]:
        """Parse an item in full; return the file offsets of the data of its storages.

        Args:
            source: File of the item.
            item: The item.
            known: Offsets in the item and bytes of ranges already read.
            expected: The storages, as derived from the head of the item.

        Raises:
            CheckpointError: The item is damaged, or differs from ``expected``.
        """
        section, index = self.parse(source, item, self._limits, known)
        for storage in expected:
            if storage.entry is not None and _tensor(index, source, item) != storage.entry:
                raise _error("the tensor of an item does not match its first bytes", source, item)
            nbytes = index.storages[storage.position].nbytes if storage.position < len(index.storages) else None
            if nbytes != storage.nbytes:
                problem = "the storages of an item do not match its first bytes"
                raise _error(problem, source, item, expected=f"{storage.nbytes} bytes", found=nbytes)
        with _errors_in_file(item):
            offsets = self._format.locate(section, index, [storage.position for storage in expected])
        return [section.start + offsets[storage.position] for storage in expected]

    def parse(
        self, source: Source, item: Item, limits: Limits, known: Iterable[tuple[int, bytes]] = ()
    ) -> tuple[Section, Index]:
        """Return an item, which may hold any object or the inert leaf of one, and its index.

        Args:
            source: File of the item.
            item: The item.
            limits: Bounds for hostile files.
            known: Offsets in the item and bytes of ranges already read.

        Raises:
            CheckpointError: The item is not a ``torch.save`` file that sluice reads.
        """
        section = Section(source, item.offset, item.nbytes, known=known)
        with _errors_in_file(item):
            start = section.read_at(0, _MIN_ITEM_BYTES)
            if not is_torch_zip(start):
                raise FormatError("an item is not a torch.save file", file=source.path, offset=0, found=start)
            index = self._format.read_index(section, limits)
            if index.metadata["byteorder"] != "little":
                problem = "an item of a distributed checkpoint was written on a big-endian machine"
                raise UnsupportedError(problem, file=source.path)
            return section, index


class ItemFile(Struct, frozen=True, eq=False):
    """Locator of the data in one data file; see ``Locator``."""

    #: Parser of the items.
    reader: ItemReader
    #: The storages of the index of the file, by position.
    storages: Sequence[ItemStorage]

    def locate(self, source: Source, index: Index, storages: Iterable[int]) -> Mapping[int, int]:
        unlocated = [position for position in storages if not index.storages[position].located]
        unlocated.sort(key=lambda position: (self.storages[position].item.offset, position))
        groups = [
            (item, list(positions))
            for item, positions in groupby(unlocated, lambda position: self.storages[position].item)
        ]
        offsets: dict[int, int] = {}
        for batch in _batches(groups):
            ends = _read_ends(source, [item for item, _ in batch])
            for (item, positions), known in zip(batch, ends, strict=True):
                expected = [self.storages[position] for position in positions]
                offsets.update(zip(positions, self.reader.offsets(source, item, known, expected), strict=True))
        return offsets

    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
        checksums: list[Checksum | CheckpointError] = []
        for item in dict.fromkeys(storage.item for storage in self.storages):
            try:
                of_records = TorchZipFormat().checksums(Section(source, item.offset, item.nbytes), limits)
            except CheckpointError as error:
                of_records = [error]
            for checksum in of_records:
                if isinstance(checksum, CheckpointError):
                    checksums.append(_in_file(checksum, item))
                else:
                    name, offset = f"{item.name}/{checksum.name}", checksum.offset + item.offset
                    checksums.append(replace(checksum, name=name, offset=offset))
        return checksums


def _batches(items: Sequence[AnyItem]) -> Iterator[Sequence[AnyItem]]:
    """Split items into batches of which at most 1 MiB is read together."""
    count = _TOGETHER_BYTES // (_HEAD_BYTES + _TAIL_BYTES)
    return (items[first : first + count] for first in range(0, len(items), count))


def _read_ends(source: Source, items: Sequence[Item]) -> list[list[tuple[int, bytes]]]:
    """Read the first and last bytes of each item; return them with their offsets in the item."""
    starts: list[int] = []
    sizes: list[int] = []
    for item in items:
        head = min(_HEAD_BYTES, item.nbytes)
        tail = min(_TAIL_BYTES, item.nbytes - head)
        starts += [item.offset, item.offset + item.nbytes - tail]
        sizes += [head, tail]
    contents = read_ranges(source, starts, sizes)
    ends = zip(items, contents[::2], contents[1::2], strict=True)
    return [[(0, head), (item.nbytes - len(tail), tail)] for item, head, tail in ends]


@contextmanager
def _errors_in_file(item: Item) -> Iterator[None]:
    try:
        yield
    except CheckpointError as error:
        raise _in_file(error, item) from error.__cause__


def _in_file(error: CheckpointError, item: Item) -> CheckpointError:
    """Add the name of the item to an error, and convert its offset to one in the file."""
    if error.offset is not None:
        error.offset += item.offset
    error.tensor = f"{item.name}.{error.tensor}" if error.tensor else item.name
    return error


def _tensor(index: Index, source: Source, item: Item) -> Entry | UnsupportedValue:
    if isinstance(index.tree, UnsupportedValue):
        return dataclasses.replace(index.tree, inner=None)  # with storages of the item, not of the checkpoint
    if isinstance(index.tree, Opaque):
        found = index.tree.qualified_name
        problem = "the item of a tensor holds an object that cannot be built without running code"
        raise UnsafeContentError(problem, file=source.path, tensor=item.name, offset=item.offset, found=found)
    if not isinstance(index.tree, Entry) or index.tree.bare:
        raise _error("the item of a tensor does not hold a tensor", source, item, found=type(index.tree).__name__)
    if index.tree.composite is not None:
        reason = "a tensor whose chunks are not dense"
        return UnsupportedValue(qualified_name=index.tree.layout, reason=reason, file=source.path)
    # torch copies only the elements of a chunk, not its other properties
    return replace(index.tree, parameter=False, requires_grad=False, attributes=None)


def _error(problem: str, source: Source, item: Item, *, expected: object = None, found: object = None) -> FormatError:
    return FormatError(problem, file=source.path, tensor=item.name, offset=item.offset, expected=expected, found=found)
