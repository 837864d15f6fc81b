"""The items of a torch.distributed.checkpoint directory: ``torch.save`` files, one after the other in a few files.

Each item is parsed by the reader of such files (``_torch_zip``) as if it were alone, in a section of its file. That of
a chunk holds one tensor; that of a value holds any object, which may have tensors inside of it.

To open a checkpoint, values are parsed in full, and of each chunk the first bytes are read, neighbours together: the
stride of a chunk is written nowhere else. The records before its data, up to the end of data.pkl, are the same bytes
for all chunks of one dtype, shape and stride, so only the first chunk of each kind is parsed. Whatever is believed here
is checked again, by a full parse, when ``locate`` looks for the data of a chunk: before any of it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeVar

from sluice._errors import CheckpointError, FormatError, UnsafeContentError, UnsupportedError
from sluice._options import Limits
from sluice.formats.archives.zip_records import record_checksums
from sluice.formats.coalesced import read_ranges
from sluice.formats.foreign import recognise_placeholder
from sluice.formats.protocol import Checksum
from sluice.formats.safetensors.reader import SafetensorsFormat
from sluice.formats.torch_save.zip_format import TorchZipFormat
from sluice.records import Entry, Index, Opaque, UnsupportedValue
from sluice.sources.protocol import Source
from sluice.sources.section import Section

__all__ = ["Item", "ItemFile", "ItemReader", "ItemStorage", "check_items"]

Anything = TypeVar("Anything")


#: Bytes that are read of each item to tell its dtype, shape and stride. torch's take about 300.
_HEAD_BYTES = 1024

#: Bytes at the end of an item that hold its directory. torch's take about 900.
_TAIL_BYTES = 2048

#: Values up to this size are read at once; most take about 1,500.
_SMALL_BYTES = 16 << 10

#: Smallest zip archive.
_SMALLEST_BYTES = 22

#: Bytes of a file that tell its kind.
_START_BYTES = 64

#: Kinds of chunks, and pickles, that are remembered. Models have many tensors of few shapes.
_REMEMBERED = 4096

#: What follows the data of a record whose sizes its local header does not know.
_DESCRIPTOR = b"PK\7\x08"


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One item of a file."""

    #: Its name, with the start of the chunk where the tensor has several; for messages and storages.
    name: str
    #: First byte in the file.
    offset: int
    #: Bytes of the item.
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemStorage:
    """A storage of a file: which one of which item."""

    #: The item.
    item: Item
    #: The tensor that the item is expected to hold, in its own numbering; None for a value, which was parsed in full.
    entry: Entry | None
    #: Its position in the index of the item.
    position: int
    #: Its bytes of data.
    nbytes: int


def check_items(source: Source, items: Sequence[Item]) -> None:
    """Check the places of all items of a file, which are sorted by offset.

    Raises:
        UnsupportedError: The file was written as safetensors.
        IncompleteCheckpointError: It stands for a file that was never downloaded.
        FormatError: An item reaches past the end of the file or into the next.
    """
    size = source.identity.nbytes
    start = source.read_at(0, min(_START_BYTES, size))
    placeholder = recognise_placeholder(start, source.path)
    if placeholder is not None:
        raise placeholder
    if SafetensorsFormat().matches(start):
        problem = "the data of this distributed checkpoint is written as safetensors, which sluice does not read"
        raise UnsupportedError(problem, file=source.path)
    end = 0
    for item in items:
        if item.offset < end:
            problem = "an item starts inside another"
            raise _error(problem, source, item, expected=f"byte {end} or later", found=f"byte {item.offset}")
        end = item.offset + item.nbytes
        if end > size:
            problem = "an item reaches past the end of its file, which is cut short or another file"
            raise _error(problem, source, item, expected=f"at least {end} bytes", found=f"{size} bytes")
        if item.nbytes < _SMALLEST_BYTES:
            raise _error("an item is too short to be a torch.save file", source, item, found=f"{item.nbytes} bytes")


class ItemReader:
    """Parses the items of one checkpoint, whatever their files: what is the same in many is parsed once."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._format = TorchZipFormat(remembered=_REMEMBERED, whole_objects=True)
        self._chunks: dict[bytes, tuple[Entry, int]] = {}

    def value(self, source: Source, item: Item, limits: Limits) -> Index:
        """Return the index of an item that holds a value: any object, or the placeholder of one.

        Raises:
            CheckpointError: It is no ``torch.save`` file that sluice reads.
        """
        small = [(0, source.read_at(item.offset, item.nbytes))] if item.nbytes <= _SMALL_BYTES else []
        _, index = self._parse(source, item, limits, small)
        return index

    def chunks(self, source: Source, items: Sequence[Item]) -> list[tuple[Entry | UnsupportedValue, int]]:
        """Return the tensor of each item, in the item's own numbering, and the bytes of its storage.

        A tensor of a kind that sluice does not assemble is an ``UnsupportedValue`` without bytes.

        Args:
            source: Their file.
            items: Items, sorted by offset.

        Raises:
            CheckpointError: An item is not a ``torch.save`` file of one tensor.
        """
        found: list[tuple[Entry | UnsupportedValue, int]] = []
        for some in _batches(items):
            sizes = [min(_HEAD_BYTES, item.nbytes) for item in some]
            heads = read_ranges(source, [item.offset for item in some], sizes)
            found += [self._chunk(source, item, head) for item, head in zip(some, heads, strict=True)]
        return found

    def _chunk(self, source: Source, item: Item, head: bytes) -> tuple[Entry | UnsupportedValue, int]:
        kind = head[: head.find(_DESCRIPTOR) + 1]
        chunk = self._chunks.get(kind)
        if chunk is None:
            _, index = self._parse(source, item, self._limits, [(0, head)])
            entry = _tensor(index, source, item)
            if isinstance(entry, UnsupportedValue):
                return entry, 0
            chunk = entry, index.storages[entry.storage].nbytes
            if kind and len(self._chunks) < _REMEMBERED:
                self._chunks[kind] = chunk
        return chunk

    def offsets(
        self, source: Source, item: Item, known: Iterable[tuple[int, bytes]], expected: Sequence[ItemStorage]
    ) -> list[int]:
        """Return where in the file the data of the item's storages starts, after a full check of the item.

        Args:
            source: Its file.
            item: The item.
            known: Ranges of it that were read already, by their offset in the item.
            expected: What the storages were taken for.

        Raises:
            CheckpointError: The item is damaged, or holds something else.
        """
        section, index = self._parse(source, item, self._limits, known)
        for storage in expected:
            if storage.entry is not None and _tensor(index, source, item) != storage.entry:
                raise _error("an item holds another tensor than its first bytes say", source, item)
            nbytes = index.storages[storage.position].nbytes if storage.position < len(index.storages) else None
            if nbytes != storage.nbytes:
                problem = "an item holds other storages than its first bytes say"
                raise _error(problem, source, item, expected=f"{storage.nbytes} bytes", found=nbytes)
        with _placed(section, item):
            found = self._format.locate(section, index, [storage.position for storage in expected])
        return [section.start + found[storage.position] for storage in expected]

    def _parse(
        self, source: Source, item: Item, limits: Limits, known: Iterable[tuple[int, bytes]]
    ) -> tuple[Section, Index]:
        section = Section(source, item.offset, item.nbytes, known=known)
        with _placed(section, item):
            start = section.read_at(0, _SMALLEST_BYTES)
            if not self._format.matches(start):
                raise FormatError("an item is no torch.save file", file=source.path, offset=0, found=start)
            index = self._format.read_index(section, limits)
            if index.metadata["byteorder"] != "little":
                problem = "an item of a distributed checkpoint was written on a big-endian machine"
                raise UnsupportedError(problem, file=source.path)
            return section, index


class ItemFile:
    """Finds the data of the items of one file; see ``Locator``."""

    def __init__(self, reader: ItemReader, storages: Sequence[ItemStorage]) -> None:
        """Keep what each storage of the file's index is."""
        self._reader = reader
        self._storages = storages

    def locate(self, source: Source, index: Index, storages: Iterable[int]) -> Mapping[int, int]:
        wanted = [number for number in storages if not index.storages[number].located]
        wanted.sort(key=lambda number: (self._storages[number].item.offset, number))
        groups = [
            (item, list(numbers)) for item, numbers in groupby(wanted, lambda number: self._storages[number].item)
        ]
        found: dict[int, int] = {}
        for some in _batches(groups):
            ends = _read_ends(source, [item for item, _ in some])
            for (item, numbers), known in zip(some, ends, strict=True):
                expected = [self._storages[number] for number in numbers]
                found.update(zip(numbers, self._reader.offsets(source, item, known, expected), strict=True))
        return found

    def checksums(self, source: Source, limits: Limits) -> list[Checksum | CheckpointError]:
        found: list[Checksum | CheckpointError] = []
        for item in dict.fromkeys(storage.item for storage in self._storages):
            section = Section(source, item.offset, item.nbytes)
            try:
                with _placed(section, item):
                    inside = record_checksums(section, limits)
            except CheckpointError as error:
                found.append(error)
                continue
            for one in inside:
                if isinstance(one, Checksum):
                    found.append(replace(one, name=f"{item.name}/{one.name}", offset=one.offset + item.offset))
                    continue
                with suppress(CheckpointError), _placed(section, item):
                    raise one
                found.append(one)
        return found


def _batches(items: Sequence[Anything]) -> Iterator[Sequence[Anything]]:
    """Split items such that what is read of one batch takes at most 1 MiB."""
    count = (1 << 20) // (_HEAD_BYTES + _TAIL_BYTES)
    return (items[first : first + count] for first in range(0, len(items), count))


def _read_ends(source: Source, items: Sequence[Item]) -> list[list[tuple[int, bytes]]]:
    """Return the first and the last bytes of each item, with their offsets in the item."""
    starts: list[int] = []
    sizes: list[int] = []
    for item in items:
        head = min(_HEAD_BYTES, item.nbytes)
        tail = min(_TAIL_BYTES, item.nbytes - head)
        starts += [item.offset, item.offset + item.nbytes - tail]
        sizes += [head, tail]
    read = read_ranges(source, starts, sizes)
    pieces = [
        (start - items[number // 2].offset, data) for number, (start, data) in enumerate(zip(starts, read, strict=True))
    ]
    return [pieces[first : first + 2] for first in range(0, len(pieces), 2)]


@contextmanager
def _placed(section: Section, item: Item) -> Iterator[None]:
    """Let errors about the item name it, and count their offsets from the start of the file."""
    try:
        yield
    except CheckpointError as error:
        if error.offset is not None:
            error.offset += section.start
        error.tensor = f"{item.name}.{error.tensor}" if error.tensor else item.name
        raise


def _tensor(index: Index, source: Source, item: Item) -> Entry | UnsupportedValue:
    if isinstance(index.tree, UnsupportedValue):
        return index.tree
    if isinstance(index.tree, Opaque):
        found = index.tree.qualified_name
        problem = "the item of a tensor holds an object that only running code could build"
        raise UnsafeContentError(problem, file=source.path, tensor=item.name, offset=item.offset, found=found)
    if not isinstance(index.tree, Entry):
        raise _error("the item of a tensor holds something else", source, item, found=type(index.tree).__name__)
    if index.tree.composite is not None:
        reason = "a tensor in chunks that are not dense"
        return UnsupportedValue(qualified_name=index.tree.layout, reason=reason, file=source.path)
    # torch copies the elements of a chunk, no more
    return replace(index.tree, parameter=False, requires_grad=False, attributes=None)


def _error(problem: str, source: Source, item: Item, *, expected: object = None, found: object = None) -> FormatError:
    return FormatError(problem, file=source.path, tensor=item.name, offset=item.offset, expected=expected, found=found)
