"""The data files of a torch.distributed.checkpoint directory: opened together, with the values and headers in them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from sluice._defaults import INDEXING_THREADS, REMOTE_REQUESTS
from sluice._errors import CheckpointError, IncompleteCheckpointError
from sluice._messages import SHOWN, section
from sluice._options import Limits
from sluice._threads import in_threads
from sluice.checkpoint.open_file import open_member
from sluice.formats.distributed.items import ChunkHeader, Item, ItemReader, check_items
from sluice.formats.distributed.metadata import SavedChunk, TensorItem
from sluice.records import Index
from sluice.sources.directory import Directory
from sluice.sources.protocol import Source, checks_with_data
from sluice.sources.wrappers import ReadAhead

__all__ = ["DataFiles", "ListedItem"]

#: Bytes of an item besides its data and its pickle; slightly more than torch writes.
_RECORDS_BYTES = 2048


class ListedItem(NamedTuple):
    """An item, and the tensor and chunk that it holds; None for a value that is not a tensor."""

    item: Item
    tensor: TensorItem | None
    chunk: SavedChunk | None

    @property
    def filled(self) -> bool:
        """Whether it is a chunk of a tensor that has elements."""
        return self.tensor is not None and 0 not in self.tensor.shape


class DataFiles:
    """The data files of one directory. Each is opened, and its headers are read, in a thread of several."""

    def __init__(self, directory: Directory, limits: Limits) -> None:
        """Keep the directory; nothing is opened."""
        self._directory, self._limits = directory, limits
        self._opened: list[Source | None] = []
        self._header_bytes_left = limits.header_bytes
        self._parsing = threading.Lock()
        #: Parser of the items.
        self.reader = ItemReader(limits)
        #: Index of each value, by name.
        self.values: dict[str, Index] = {}

    @property
    def sources(self) -> list[Source]:
        """The open files, in the order of their names."""
        return [source for source in self._opened if source is not None]

    def open(self, files: Mapping[str, Sequence[ListedItem]]) -> None:
        """Open the files, check the places of their items and read their values.

        Args:
            files: Items of each file, sorted by offset.

        Raises:
            FormatError: The items do not fit their files.
            IncompleteCheckpointError: Files are missing.
            CheckpointError: A file or a value is damaged, unsafe or of a kind that sluice does not read.
            LimitError: The values exceed the limits.
        """
        missing: list[int] = []
        names, listed = list(files), list(files.values())
        self._opened = [None] * len(names)

        def work(position: int) -> None:
            source = open_member(self._directory, names[position], self._limits)
            self._opened[position] = source
            if source is None:
                missing.append(position)
            elif not missing:
                check_items(source, [each.item for each in listed[position]])
                headers = ReadAhead(source)
                for each in listed[position]:
                    if each.tensor is None:
                        self._read_value(headers, each.item)

        try:
            in_threads(work, len(names), threads=INDEXING_THREADS, name="sluice-index")
        except CheckpointError:
            if not missing:  # which says more
                raise
        if missing:
            absent = [repr(names[position]) for position in sorted(missing)]
            lines = section("missing files", absent[:SHOWN], absent)
            text = f"files named in the metadata do not exist\n{lines}\nNothing was read"
            raise IncompleteCheckpointError(text, file=self._directory.path)

    def headers(self, files: Mapping[str, Sequence[ListedItem]]) -> list[list[ChunkHeader]]:
        """Return the headers of the chunks of each file that have elements.

        They are read by the first bytes of the items or, where each read is a request, by all of them but their data.
        """
        sources, listed = self.sources, list(files.values())
        expensive = any(map(checks_with_data, sources))
        read = self.reader.located if expensive else self.reader.chunks
        found: list[list[ChunkHeader]] = [[] for _ in sources]

        def work(position: int) -> None:
            found[position] = read(sources[position], [each.item for each in listed[position] if each.filled])

        # Files with many items are read one after the other: the items of each are read in several threads.
        most = max((sum(each.filled for each in items) for items in listed), default=0)
        threads = REMOTE_REQUESTS // max(1, most) if expensive else 1
        in_threads(work, len(sources), threads=max(1, threads), name="sluice-index")
        return found

    def close(self) -> None:
        """Close the files."""
        for source in self.sources:
            source.close()

    def _read_value(self, source: Source, item: Item) -> None:
        with self._parsing:  # the limit is that of all values together
            limits = dataclasses.replace(self._limits, header_bytes=self._header_bytes_left)
            _, index = self.reader.parse(source, item, limits)
            rest = item.nbytes - sum(storage.nbytes for storage in index.storages) - _RECORDS_BYTES
            self._header_bytes_left = max(0, self._header_bytes_left - max(0, rest))
            self.values[item.name] = index
