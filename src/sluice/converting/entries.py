"""Contents of a conversion: the tensors of a checkpoint, which are read in batches in the order of the new file."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, groupby
from typing import Self

import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._options import PageCache
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.converting.contents import finished_dtype, refuse_repeats
from sluice.entries.slicing import boxes, slice_entry
from sluice.entries.tree import flatten
from sluice.reading.reader import CheckpointReader
from sluice.records import Elements, Entry, Index
from sluice.records.geometry import contiguous_stride, overlapping, span_elements
from sluice.writing.contents import WrittenItem, stored_once
from sluice.writing.pickle_walk import walk_object
from sluice.writing.safetensors import TensorOutline
from sluice.writing.torch_pickle import is_plain, pickle_object, refusal
from sluice.writing.torch_tensors import Call, Persistent, rebuilt, stored
from sluice.writing.torch_zip import HashedTensor, TorchFile

__all__ = ["Entries"]


class Entries(Struct, eq=False, dict=True):
    """Entries of a checkpoint; see ``Contents``. Reads in its ``with`` block."""

    #: The source.
    checkpoint: OpenCheckpoint
    #: An object with its entries.
    tree: object
    #: Dtype that real floating-point tensors are cast to; None keeps each dtype.
    dtype: str | None
    #: Bytes of entries that are read at once. One batch is written while the next is read.
    batch_bytes: int
    #: Bytes of the buffers of reads.
    staging_bytes: int
    #: Use of the page cache.
    page_cache: PageCache

    @cached_property
    def reader(self) -> CheckpointReader:
        """Reads the entries."""
        return CheckpointReader(self.checkpoint)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.reader.__exit__(*error)

    def finished(self, entry: Entry) -> str:
        """Return the dtype of an entry in the file."""
        return finished_dtype(entry, self.dtype)

    def named(self) -> Mapping[str, Entry]:
        return flatten(self.tree, self.checkpoint.limits)

    def distinct(self) -> tuple[dict[str, Entry], dict[str, str]]:
        assert isinstance(self.tree, dict)
        stored, ties = stored_once(self.tree, _identity)
        refuse_repeats(stored, self.checkpoint)
        self._locate(stored.values())
        return stored, ties

    def outlines(self, tensors: Mapping[str, Entry]) -> dict[str, TensorOutline]:
        return {name: TensorOutline(self.finished(entry), entry.shape) for name, entry in tensors.items()}

    def casts(self, tensors: Iterable[Entry]) -> Mapping[str, int]:
        pairs = ((entry.dtype, self.finished(entry)) for entry in tensors)
        return Counter(f"{own} -> {finished}" for own, finished in pairs if own != finished)

    def lay_out(self, obj: object, named: Mapping[str, Entry]) -> TorchFile:
        walked = walk_object(obj, _attributes)
        self._locate(walked.tensors)
        storages = _Storages(walked.tensors, self.finished, self.checkpoint.index)
        return TorchFile(
            pickled=pickle_object(obj, walked, storages.described()),
            storages=storages.sources,
            sizes=storages.sizes,
            tensors=walked.places,
            casts=self.casts(walked.tensors),
            hashed=storages.hashed(named),
        )

    def pieces(
        self, items: Iterable[WrittenItem], drain: Callable[[], None]
    ) -> Iterator[tuple[WrittenItem, torch.Tensor]]:
        pending = None
        for batch in chain(self._batches(items), (None,)):
            started = None
            if batch is not None:
                entries = [entry for _, entry in batch]
                running = self.reader.start(entries, staging_bytes=self.staging_bytes, page_cache=self.page_cache)
                started = [item for item, _ in batch], running
                del running
            if pending is not None:
                yield from zip(pending[0], pending[1](), strict=True)
                pending = None
                drain()  # the memory of the batch is free now
            pending = started

    def _batches(self, items: Iterable[WrittenItem]) -> Iterator[list[tuple[WrittenItem, Entry]]]:
        batch: list[tuple[WrittenItem, Entry]] = []
        nbytes = fills = 0
        for item in items:
            for piece in self._cut(item.source):
                more = max(1, len(piece.parts))
                if batch and (nbytes + piece.nbytes > self.batch_bytes or fills + more > defaults.SCAN_BATCH_PIECES):
                    yield batch
                    batch, nbytes, fills = [], 0, 0
                batch.append((item, piece))
                nbytes += piece.nbytes
                fills += more
        if batch:
            yield batch

    def _cut(self, entry: Entry) -> Iterator[Entry]:
        if entry.nbytes <= self.batch_bytes:
            yield entry
            return
        # Packs are decoded as a whole. The sizes of all are powers of two.
        whole = max(1 if (packing := piece.elements.packing) is None else packing.elements for piece in entry.pieces)
        for key in boxes(entry.shape, self.batch_bytes // ITEM_BYTES[entry.dtype], whole):
            yield slice_entry(entry, key)

    def _locate(self, entries: Iterable[Entry]) -> None:
        """Check the headers of all data before anything is written."""
        self.checkpoint.locate({number for entry in entries if entry.numel for number in entry.storages})


def _attributes(value: object) -> Mapping[str, object] | None:
    if isinstance(value, Entry):
        return value.attributes or {}
    if is_plain(value):
        return None
    raise refusal(value)


def _identity(entry: Entry) -> Entry | None:
    return replace(entry, parameter=False, requires_grad=False, origin="") if entry.numel else None


class _Storages:
    """Storages of a torch file: what each holds, and the place of each entry in them; in columns, for 100,000 of them.

    As in the source, views of the same bytes share a storage. Views that neither overlap nor touch become storages of
    their own, so that the file holds what is between the first and the last element of a view, and nothing else.
    """

    def __init__(self, entries: Sequence[Entry], finished: Callable[[Entry], str], index: Index) -> None:
        """Assign each entry a place.

        Args:
            entries: The tensors, which are dense.
            finished: Returns the dtype of an entry in the file.
            index: Index of the checkpoint.
        """
        self._entries = entries
        self._finished = finished
        #: Entry of the row-major elements of each storage, and its dtype.
        self.sources: list[tuple[Entry, str]] = []
        #: Size of each storage, in bytes.
        self.sizes = array("Q")
        self._storage, self._start = (array("Q", bytes(8 * len(entries))) for _ in range(2))
        first: dict[object, int] = {}
        first_use = array("Q", (first.setdefault(self._kind(i, index), i) for i in range(len(entries))))
        order = sorted(range(len(entries)), key=lambda i: (first_use[i], entries[i].storage_offset))
        for _, positions in groupby(order, key=first_use.__getitem__):
            for members in overlapping(positions, lambda i: (entries[i].storage_offset, _end(entries[i]))):
                self._place(members)

    def _kind(self, position: int, index: Index) -> object:
        """Return equal values for views of one source that may share a storage."""
        entry = self._entries[position]
        if entry.parts:
            return entry.parts, self._finished(entry)
        shorter = entry.bare and entry.nbytes < index.storages[entry.storage].nbytes  # a part of a storage object
        alone = position if shorter or entry.elements.packing else None
        return entry.storage, entry.stored.elements, self._finished(entry), alone

    def _place(self, members: Sequence[int]) -> None:
        """Add the storage of overlapping views."""
        entry = self._entries[members[0]]
        first, end = entry.storage_offset, max(_end(self._entries[position]) for position in members)
        source = entry.stored if entry.parts else replace(entry.stored, shape=(end - first,), stride=(1,))
        dtype = self._finished(entry)
        self.sources.append((source, dtype))
        self.sizes.append(source.numel * ITEM_BYTES[dtype])
        for position in members:
            self._storage[position] = len(self.sources) - 1
            self._start[position] = self._entries[position].storage_offset - first

    def _view(self, position: int) -> tuple[Entry, int]:
        """Return an entry as a view of its storage in the new file, and the elements of this storage."""
        entry, storage = self._entries[position], self._storage[position]
        dtype = self.sources[storage][1]
        view = replace(
            entry,
            elements=Elements(dtype=dtype, math_bits=entry.elements.view_bits),
            storage=storage,
            storage_offset=self._start[position],
            stride=contiguous_stride(entry.shape) if entry.parts else entry.stride,
        )
        return view, self.sizes[storage] // ITEM_BYTES[dtype]

    def described(self) -> Iterator[Call | Persistent]:
        """Yield what rebuilds each entry in the pickle."""
        for view, elements in map(self._view, range(len(self._entries))):
            storage = stored(view, elements)
            yield storage if view.bare else rebuilt(view, storage)

    def hashed(self, named: Mapping[str, Entry]) -> dict[str, HashedTensor]:
        """Return entries for the manifest, by name."""
        positions = {id(entry): position for position, entry in enumerate(self._entries)} if named else {}
        hashed = {}
        for name, entry in named.items():
            view, elements = self._view(positions[id(entry)])
            whole = view.stride == contiguous_stride(view.shape) and view.elements.verbatim and view.numel == elements
            outline = TensorOutline(view.dtype, view.shape)
            hashed[name] = HashedTensor(outline=outline, storage=view.storage if whole else None, source=entry)
        return hashed


def _end(entry: Entry) -> int:
    return entry.storage_offset + span_elements(entry.shape, entry.stride)
