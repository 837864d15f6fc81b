"""Storages of a torch file that a conversion writes: the place of each tensor, and the targets, batch by batch.

The records of all targets of 100,000 tensors would take more memory than their index. Targets are therefore laid out
twice: first for the places of the tensors, which are kept in columns of numbers, and again batch by batch when they are
filled. Tensors that share bytes are in the same batch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import numpy as np

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice.converting.conversion import Conversion
from sluice.planning.memory_layout import shared_targets
from sluice.records import NO_STORAGE, Entry, Quantized, Request, Target, View
from sluice.writing.torch_tensors import Described, Geometry, QuantizedParts, SparseParts

__all__ = ["Storages", "descriptions", "stored_bytes"]


class Storages:
    """Numbered storages; views of the same bytes of the source share one."""

    def __init__(
        self, conversion: Conversion, entries: Sequence[Entry], dense: Sequence[Entry], names: Sequence[str]
    ) -> None:
        """Assign each tensor a place.

        Args:
            conversion: The conversion.
            entries: The tensors.
            dense: The ``components`` of all entries, in order.
            names: Name of each component, for messages.
        """
        self._conversion = conversion
        self._dense = dense
        self._names = names
        # Never cast. The same integers may also be a separate tensor, and a storage has one dtype.
        self._quantized = {id(part) for entry in entries if _is_quantized(entry) for part in entry.components}
        self._offsets = conversion.offsets(dense)
        self._order = _neighbours(dense)
        #: Size of each storage, in bytes.
        self.sizes = array("Q")
        self._storage, self._start = array("Q", bytes(8 * len(dense))), array("Q", bytes(8 * len(dense)))
        #: Strides that differ from those in the source, by position.
        self._stride: dict[int, tuple[int, ...]] = {}
        for positions in self._batches():
            self._note(positions, *self._lay_out(positions))

    def _note(self, positions: Sequence[int], targets: Sequence[Target], views: Sequence[View]) -> None:
        first = len(self.sizes)
        self.sizes.extend(target.nbytes for target in targets)
        for position, view in zip(positions, views, strict=True):
            self._storage[position] = first + view.target
            self._start[position] = view.start
            if view.stride != self._dense[position].stride:
                self._stride[position] = view.stride

    def targets(self) -> Iterator[Target]:
        """Yield the target of each storage, laid out batch by batch."""
        for positions in self._batches():
            yield from self._lay_out(positions)[0]

    def geometry(self, position: int) -> Geometry:
        """Return the description of a tensor for the pickle."""
        entry = self._dense[position]
        storage, dtype = self._storage[position], self._dtype(position)
        return Geometry(
            storage=storage,
            elements=self.sizes[storage] // ITEM_BYTES[dtype],
            dtype=dtype,
            start=self._start[position],
            shape=entry.shape,
            stride=self._stride.get(position, entry.stride),
            math_bits=entry.math_bits,
        )

    def _dtype(self, position: int) -> str:
        entry = self._dense[position]
        return entry.dtype if id(entry) in self._quantized else self._conversion.finished(entry)

    def _lay_out(self, positions: Sequence[int]) -> tuple[tuple[Target, ...], tuple[View, ...]]:
        requests = [
            Request(
                name=self._names[position],
                entry=self._dense[position],
                dtype=self._dtype(position),
                device="cpu",
                alone=id(self._dense[position]) in self._quantized or self._is_shorter(self._dense[position]),
            )
            for position in positions
        ]
        return shared_targets(requests, self._conversion.checkpoint.index, self._offsets)

    def _is_shorter(self, entry: Entry) -> bool:
        """Return whether an entry is a storage object that is a part of the storage in the file."""
        return entry.bare and entry.nbytes < self._conversion.checkpoint.index.storages[entry.storage].nbytes

    def _batches(self) -> Iterator[list[int]]:
        """Yield groups of positions; tensors that may share bytes of the source are in the same group."""
        batch: list[int] = []
        fills, last, end = 0, None, 0
        for position in map(int, self._order):
            entry = self._dense[position]
            source = entry.storage if entry.storage != NO_STORAGE else entry.parts
            first, behind = entry.byte_span
            if source != last:
                end = 0
            if fills >= defaults.STREAM_FILLS and (source != last or first > end):
                yield batch
                batch, fills = [], 0
            batch.append(position)
            fills += max(1, len(entry.parts))
            last, end = source, max(end, behind)
        if batch:
            yield batch


def _neighbours(dense: Sequence[Entry]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the positions grouped by storage and sorted by first byte.

    Storages are in order of first occurrence.
    """
    sources = (entry.storage if entry.storage != NO_STORAGE else hash(entry.parts) for entry in dense)
    _, first, group = np.unique(
        np.fromiter(sources, dtype=np.int64, count=len(dense)), return_index=True, return_inverse=True
    )
    begins = np.fromiter((entry.byte_span[0] for entry in dense), dtype=np.uint64, count=len(dense))
    return np.lexsort((begins, first[group]))


def stored_bytes(conversion: Conversion, entry: Entry) -> int:
    """Return the size of an entry in a file of its own, in bytes, if it is not expanded."""
    dtypes = (part.dtype if _is_quantized(entry) else conversion.finished(part) for part in entry.components)
    return sum(part.numel * ITEM_BYTES[dtype] for part, dtype in zip(entry.components, dtypes, strict=True))


def _is_quantized(entry: Entry) -> bool:
    return isinstance(entry.composite, Quantized)


def descriptions(entries: Iterable[Entry], storages: Storages) -> Iterator[Described]:
    """Yield the description of each entry for the pickle; ``entries`` are all entries of the storages."""
    positions = count()
    for entry in entries:
        parts = [storages.geometry(next(positions)) for _ in entry.components]
        yield Described(
            content=_describe(entry, parts),
            requires_grad=entry.requires_grad,
            parameter=entry.parameter,
            bare=entry.bare,
            attributes=entry.attributes,
        )


def _describe(entry: Entry, parts: Sequence[Geometry]) -> Geometry | SparseParts | QuantizedParts:
    composite = entry.composite
    if composite is None:
        return parts[0]
    if not isinstance(composite, Quantized):
        return SparseParts(
            layout=composite.layout, parts=tuple(parts), shape=entry.shape, coalesced=composite.coalesced
        )
    integers, *channels = parts
    scales, zero_points = channels or (composite.scales, composite.zero_points)
    assert not isinstance(scales, Entry)
    assert not isinstance(zero_points, Entry)
    return QuantizedParts(
        dtype=entry.dtype, integers=integers, scales=scales, zero_points=zero_points, axis=composite.axis
    )
