"""Open a checkpoint with merged adapters: tensors that they change are computed when they are read."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice._defaults import SCAN_STAGING_BYTES
from sluice._dtypes import ITEM_BYTES
from sluice._options import MemoryLimits
from sluice.adapters.config import Adapter
from sluice.adapters.merging import MergeStep, merge
from sluice.adapters.steps import AdapterFile, BaseWeight, steps_of
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.checkpoint.open_file import OpenFile
from sluice.formats.protocol import LocatedByIndex
from sluice.machine.heap import trim_heap
from sluice.reading.tensor import read_tensor
from sluice.records import Entry, FileRecord, Storage, elements_of
from sluice.records.geometry import contiguous_stride
from sluice.reports.load_figures import MergedAdapter
from sluice.sources.ranges import ComputedSource

__all__ = ["AdaptedCheckpoint", "open_adapted"]

#: Tensors of the size of the weight that a kind holds at a time, if more than one.
_SUMS = {"DoRA": 3, "LoHa": 2, "LoKr": 2}


class AdaptedCheckpoint(Struct, frozen=True, kw_only=True):
    """A checkpoint with merged adapters."""

    #: The base checkpoint, with one more file.
    checkpoint: OpenCheckpoint
    #: Entries of the tensors that change, by their first names.
    entries: Mapping[str, Entry]
    #: Records of the adapters, in order.
    adapters: tuple[MergedAdapter, ...]
    #: Host memory for adapters, and for one weight and its sums, in bytes.
    working_bytes: int


#: A tensor that adapters change, and how, in order.
_Changed: TypeAlias = "tuple[BaseWeight, Entry, list[tuple[AdapterFile, MergeStep]]]"


class _AdaptedSource(ComputedSource):
    """Computes whole tensors, one at a time: pieces of a product may differ from the whole in their last bits."""

    def __init__(self, path: str, base: OpenCheckpoint, tensors: Sequence[_Changed]) -> None:
        self.starts = [0, *accumulate(_nbytes(tensor) for tensor in tensors)]
        super().__init__(path, base, self.starts[-1])
        self._tensors = tensors
        self._lock = threading.Lock()
        #: Position and bytes of the tensor that is being read.
        self._held: tuple[int, memoryview] | None = None

    def fill_buffer(self, offset: int, buffer: memoryview) -> None:
        """See ``RangedSource``."""
        end = offset + len(buffer)
        with self._lock:
            for position in range(bisect_right(self.starts, offset) - 1, bisect_left(self.starts, end)):
                start = self.starts[position]
                piece = self._whole(position)[max(0, offset - start) : end - start]
                at = max(0, start - offset)
                buffer[at : at + len(piece)] = piece
                if self.starts[position + 1] <= end:
                    del piece
                    self.close()

    def _whole(self, position: int) -> memoryview:
        if self._held is None or self._held[0] != position:
            self.close()
            weight, entry, steps = self._tensors[position]
            memory = MemoryLimits(staging=SCAN_STAGING_BYTES)
            whole = read_tensor(self.inputs, weight.names[0], entry, dtype=weight.dtype, memory=memory)
            for file, step in steps:
                merge(whole, step, file.take(step.parts))
            self._held = position, whole.detach().reshape(-1).view(torch.uint8).numpy().data
        return self._held[1]

    def close(self) -> None:
        """Free the tensor that was read last."""
        self._held = None
        trim_heap()


def open_adapted(
    checkpoint: OpenCheckpoint, weights: Sequence[BaseWeight], adapters: Sequence[Adapter]
) -> AdaptedCheckpoint:
    """Return a checkpoint with merged adapters, of which names and scales are read; it needs no closing.

    Raises:
        MismatchError: A tensor of an adapter fits no weight.
        UnsupportedError: An adapter is of a kind that is not merged.
    """
    names = {name: weight for weight in weights for name in weight.names}
    found: dict[str, list[tuple[AdapterFile, MergeStep]]] = {}
    files, records = [AdapterFile(adapter) for adapter in adapters], []
    for file in files:
        changes = list(steps_of(file, names))
        for weight, step in changes:
            found.setdefault(weight.names[0], []).append((file, step))
        records.append(_record(file, [step for _, step in changes]))
    tensors = [
        (weight, weight.entry, found[weight.names[0]])
        for weight in weights
        if weight.names[0] in found and weight.entry is not None
    ]
    joined, entries = _joined(checkpoint, _AdaptedSource(files[0].path, checkpoint, tensors), tensors)
    return AdaptedCheckpoint(
        checkpoint=joined,
        entries={weight.names[0]: entry for (weight, _, _), entry in zip(tensors, entries, strict=True)},
        adapters=tuple(records),
        working_bytes=sum(file.nbytes for file in files) + max(map(_working_bytes, tensors)) + SCAN_STAGING_BYTES,
    )


def _nbytes(tensor: _Changed) -> int:
    return tensor[1].numel * ITEM_BYTES[tensor[0].dtype]


def _working_bytes(tensor: _Changed) -> int:
    weight, entry, steps = tensor
    sums = max((_SUMS.get(step.kind, 1) for _, step in steps if step.kind != "bias"), default=0)
    return _nbytes(tensor) + sums * entry.numel * max(4, ITEM_BYTES[weight.dtype])


def _record(file: AdapterFile, steps: Sequence[MergeStep]) -> MergedAdapter:
    return MergedAdapter(
        source=file.path,
        kinds=tuple(dict.fromkeys(step.kind for step in steps)),
        weight=file.adapter.weight,
        scales=tuple(sorted({step.scale for step in steps if step.kind != "replaced"})),
        tensors=len(steps),
    )


def _joined(
    base: OpenCheckpoint, source: _AdaptedSource, tensors: Sequence[_Changed]
) -> tuple[OpenCheckpoint, list[Entry]]:
    """Return the base with a further file, and the entries in it."""
    index, first, storages, entries = base.index, len(base.index.storages), [], []
    for number, (weight, entry, _) in enumerate(tensors):
        start, end = source.starts[number : number + 2]
        storages.append(Storage(file=len(index.files), offset=start, nbytes=end - start, key=f"adapted.{number}"))
        own = {"elements": elements_of(weight.dtype), "stride": contiguous_stride(entry.shape), "parts": ()}
        entries.append(replace(entry, storage=first + number, storage_offset=0, **own))
    joined = replace(
        index,
        files=(*index.files, FileRecord(path=source.path, identity=source.identity)),
        storages=(*index.storages, *storages),
        crcs=(*index.crcs, *(0 for _ in storages)) if index.crcs else (),
    )
    own_index = replace(joined, tree=None, storages=tuple(storages))
    file = OpenFile(source=source, locator=LocatedByIndex(), index=own_index, first_storage=first)
    return OpenCheckpoint(base.path, joined, (*base.open_files, file), base.limits, base.place), entries
