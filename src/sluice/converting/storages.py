"""Storages of a torch file that a conversion writes: what each holds, and the place of each tensor in them.

As in the source, views of the same bytes share a storage. Views that neither overlap nor touch become storages of their
own, so that the file holds what is between the first and the last element of a view, and nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES
from sluice.records import Entry, Index
from sluice.records.geometry import contiguous_stride, overlapping, span_elements
from sluice.writing.safetensors import TensorOutline
from sluice.writing.torch_tensors import Call, Geometry, Persistent, rebuilt, stored
from sluice.writing.torch_zip import HashedTensor

__all__ = ["Storages"]


class Storages:
    """Numbered storages of entries, in columns to hold 100,000 of them."""

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
        return entry.storage, entry.elements.without_math_bits(), self._finished(entry), alone

    def _place(self, members: Sequence[int]) -> None:
        """Add the storage of overlapping views."""
        entry = self._entries[members[0]]
        first, end = entry.storage_offset, max(_end(self._entries[position]) for position in members)
        bare = replace(entry, elements=entry.elements.without_math_bits()) if entry.math_bits else entry
        source = bare if entry.parts else replace(bare, shape=(end - first,), stride=(1,))
        dtype = self._finished(entry)
        self.sources.append((source, dtype))
        self.sizes.append(source.numel * ITEM_BYTES[dtype])
        for position in members:
            self._storage[position] = len(self.sources) - 1
            self._start[position] = self._entries[position].storage_offset - first

    def _geometry(self, position: int) -> Geometry:
        """Return the description of an entry for the pickle."""
        entry, storage = self._entries[position], self._storage[position]
        dtype = self.sources[storage][1]
        return Geometry(
            storage=storage,
            elements=self.sizes[storage] // ITEM_BYTES[dtype],
            dtype=dtype,
            start=self._start[position],
            shape=entry.shape,
            stride=contiguous_stride(entry.shape) if entry.parts else entry.stride,
            math_bits=entry.math_bits,
        )

    def described(self) -> Iterator[Call | Persistent]:
        """Yield what rebuilds each entry in the pickle."""
        for position, entry in enumerate(self._entries):
            view = self._geometry(position)
            if entry.bare:
                yield stored(view)
                continue
            yield rebuilt(
                view, requires_grad=entry.requires_grad, parameter=entry.parameter, attributes=entry.attributes
            )

    def hashed(self, named: Mapping[str, Entry]) -> dict[str, HashedTensor]:
        """Return entries for the manifest, by name."""
        positions = {id(entry): position for position, entry in enumerate(self._entries)} if named else {}
        hashed = {}
        for name, entry in named.items():
            view = self._geometry(positions[id(entry)])
            whole = view.stride == contiguous_stride(view.shape) and not view.math_bits and entry.numel == view.elements
            outline = TensorOutline(view.dtype, entry.shape)
            hashed[name] = HashedTensor(outline=outline, storage=view.storage if whole else None, source=entry)
        return hashed


def _end(entry: Entry) -> int:
    return entry.storage_offset + span_elements(entry.shape, entry.stride)
