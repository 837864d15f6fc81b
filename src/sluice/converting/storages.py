"""Storages of a torch file that a conversion writes: what each holds, and the place of each tensor in them.

As in the source, views of the same bytes share a storage. It holds only the bytes that they need: a view with gaps
becomes contiguous, and views that are far apart become storages of their own.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count, groupby

from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES
from sluice.records import Entry, Index, Quantized
from sluice.records.geometry import contiguous_stride, is_dense, span_elements
from sluice.writing.pickle_opcodes import Call, Persistent
from sluice.writing.safetensors import TensorOutline
from sluice.writing.torch_tensors import Geometry, Rebuild, dense, quantized, rebuilt, sparse, stored
from sluice.writing.torch_zip import HashedTensor

__all__ = ["Storages", "described"]


class Storages:
    """Numbered storages of the components of entries, in columns to hold 100,000 of them."""

    def __init__(self, entries: Sequence[Entry], finished: Callable[[Entry], str], index: Index) -> None:
        """Assign each component a place.

        Args:
            entries: The tensors.
            finished: Returns the dtype of a dense entry in the file.
            index: Index of the checkpoint.
        """
        self._dense = [part for entry in entries for part in entry.components]
        self._finished = finished
        # Never cast. The same integers may also be a separate tensor, and a storage has one dtype.
        self._quantized = {id(part) for entry in entries if _is_quantized(entry) for part in entry.components}
        #: Entry of the row-major elements of each storage, and its dtype.
        self.sources: list[tuple[Entry, str]] = []
        #: Size of each storage, in bytes.
        self.sizes = array("Q")
        self._storage, self._start = (array("Q", bytes(8 * len(self._dense))) for _ in range(2))
        #: Strides that differ from those in the source, by position.
        self._stride: dict[int, tuple[int, ...]] = {}
        first_use: dict[object, int] = {}
        for position, entry in enumerate(self._dense):
            first_use.setdefault(_source(entry), position)
        order = sorted(range(len(self._dense)), key=lambda i: (first_use[_source(self._dense[i])], self._first_byte(i)))
        for _, positions in groupby(order, key=lambda i: _source(self._dense[i])):
            forms: defaultdict[object, list[int]] = defaultdict(list)
            for position in positions:
                forms[self._form(position, index)].append(position)
            for same in forms.values():
                for members in self._overlapping(same):
                    self._place(members)

    def _form(self, position: int, index: Index) -> object:
        """Return equal values for views of one source that may share a storage."""
        entry = self._dense[position]
        quantized = id(entry) in self._quantized
        shorter = entry.bare and entry.nbytes < index.storages[entry.storage].nbytes  # a part of a storage object
        alone = position if quantized or shorter or entry.elements.packing else None
        return entry.elements.without_math_bits(), self._dtype(entry), alone

    def _first(self, position: int) -> int:
        return self._dense[position].storage_offset

    def _first_byte(self, position: int) -> int:
        return self._dense[position].byte_span[0]

    def _overlapping(self, positions: Sequence[int]) -> Iterator[list[int]]:
        """Split views of one source, in the order of their first elements, into groups that overlap or touch."""
        group: list[int] = []
        end = -1
        for position in positions:
            if group and self._first(position) > end:
                yield group
                group = []
            group.append(position)
            end = max(end, _end(self._dense[position]))
        yield group

    def _place(self, members: Sequence[int]) -> None:
        """Add the storages of overlapping views."""
        views = {_view(self._dense[position]): self._dense[position] for position in members}
        first, dtype = self._first(members[0]), self._dtype(self._dense[members[0]])
        end = max(map(_end, views.values()))
        if len(views) > 1 and end - first <= sum(entry.numel for entry in views.values()):
            number = self._add(_run(self._dense[members[0]], first, end), dtype)
            for position in members:
                self._storage[position], self._start[position] = number, self._first(position) - first
            return
        # One view, or views so sparse that separate copies take less memory than their union.
        placed: dict[object, tuple[int, tuple[int, ...]]] = {}
        for position in members:
            entry = self._dense[position]
            if _view(entry) not in placed:
                source, stride = _compact(entry)
                placed[_view(entry)] = self._add(source, dtype), stride
            self._storage[position], stride = placed[_view(entry)]
            if stride != entry.stride:
                self._stride[position] = stride

    def _add(self, source: Entry, dtype: str) -> int:
        self.sources.append((source, dtype))
        self.sizes.append(source.numel * ITEM_BYTES[dtype])
        return len(self.sources) - 1

    def _dtype(self, entry: Entry) -> str:
        return entry.dtype if id(entry) in self._quantized else self._finished(entry)

    def geometry(self, position: int) -> Geometry:
        """Return the description of a component for the pickle."""
        entry = self._dense[position]
        storage = self._storage[position]
        dtype = self.sources[storage][1]
        return Geometry(
            storage=storage,
            elements=self.sizes[storage] // ITEM_BYTES[dtype],
            dtype=dtype,
            start=self._start[position],
            shape=entry.shape,
            stride=self._stride.get(position, entry.stride),
            math_bits=entry.math_bits,
        )

    def hashed(self, named: Mapping[str, Entry]) -> dict[str, HashedTensor]:
        """Return dense entries for the manifest, by name."""
        positions = {id(entry): position for position, entry in enumerate(self._dense)} if named else {}
        hashed = {}
        for name, entry in named.items():
            view = self.geometry(positions[id(entry)])
            in_order = view.stride == contiguous_stride(view.shape) and not view.math_bits
            hashed[name] = HashedTensor(
                outline=TensorOutline(view.dtype, entry.shape),
                storage=view.storage,
                start=view.start * ITEM_BYTES[view.dtype],
                apart=None if in_order else entry,
            )
        return hashed


def _source(entry: Entry) -> object:
    return entry.parts or entry.storage


def _is_quantized(entry: Entry) -> bool:
    return isinstance(entry.composite, Quantized)


def _end(entry: Entry) -> int:
    return entry.storage_offset + span_elements(entry.shape, entry.stride)


def _view(entry: Entry) -> tuple[object, ...]:
    return entry.storage_offset, entry.shape, entry.stride


def _run(entry: Entry, first: int, end: int) -> Entry:
    """Return the elements ``first`` to ``end`` of the storage that an entry views."""
    return replace(_bare(entry), shape=(end - first,), stride=(1,), storage_offset=first)


def _bare(entry: Entry) -> Entry:
    """Return an entry without conjugation and negation, which the tensor applies to its storage."""
    return replace(entry, elements=entry.elements.without_math_bits()) if entry.math_bits else entry


def _compact(entry: Entry) -> tuple[Entry, tuple[int, ...]]:
    """Return the row-major content of a storage for one view, and the stride of the view in it."""
    if entry.parts:
        return entry, contiguous_stride(entry.shape)
    entry = _bare(entry)
    # Each element of an expanded tensor is stored once.
    shape = tuple(min(size, 1) if not step else size for size, step in zip(entry.shape, entry.stride, strict=True))
    numel, span = replace(entry, shape=shape).numel, span_elements(shape, entry.stride)
    if not is_dense(shape, entry.stride) and span <= numel:
        # Elements overlap without a step of 0, as in sliding windows: store the range that they view.
        return _run(entry, entry.storage_offset, entry.storage_offset + span), entry.stride
    if span > numel:
        stride = contiguous_stride(shape)
        order = list(range(len(shape)))
    else:
        stride = entry.stride
        order = sorted(range(len(shape)), key=lambda dim: -stride[dim])
    kept = tuple(0 if not step else new for step, new in zip(entry.stride, stride, strict=True))
    if shape == entry.shape and order == list(range(len(shape))):
        return entry, kept
    turned = replace(entry, shape=tuple(shape[dim] for dim in order), stride=tuple(entry.stride[dim] for dim in order))
    return turned, kept


def described(entries: Iterable[Entry], storages: Storages) -> Iterator[Call | Persistent]:
    """Yield what rebuilds each entry in the pickle; ``entries`` are all entries of the storages."""
    positions = count()
    for entry in entries:
        parts = [storages.geometry(next(positions)) for _ in entry.components]
        if entry.bare:
            yield stored(parts[0])
            continue
        yield rebuilt(
            _describe(entry, parts),
            requires_grad=entry.requires_grad,
            parameter=entry.parameter,
            attributes=entry.attributes,
        )


def _describe(entry: Entry, parts: Sequence[Geometry]) -> Rebuild:
    composite = entry.composite
    if composite is None:
        return partial(dense, parts[0])
    if not isinstance(composite, Quantized):
        return sparse(composite.layout, parts, entry.shape, coalesced=composite.coalesced)
    integers, *channels = parts
    scales, zero_points = channels or (composite.scales, composite.zero_points)
    assert not isinstance(scales, Entry)
    assert not isinstance(zero_points, Entry)
    return quantized(entry.dtype, integers, scales, zero_points, composite.axis)
