"""The bytes of merged tensors, one after the other, computed when they are read: a source like a file."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace

from sluice._defaults import SCAN_STAGING_BYTES
from sluice._dtypes import ITEM_BYTES
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.entries.slicing import slice_entry
from sluice.machine.processes import trim_heap
from sluice.merging.kernels import MergedTensor, compute, survey, whole_tensors
from sluice.reading.reader import CheckpointReader
from sluice.records import Entry
from sluice.records.geometry import contiguous_stride, round_down, round_up
from sluice.sources.ranges import ComputedSource

__all__ = ["ALIGNMENT", "MergeSource", "PlacedTensor"]

#: Bytes to which the first of each tensor is aligned.
ALIGNMENT = 64

#: Pieces that are computed at once: one is computed while another one is read.
_AT_ONCE = 2

#: Bytes of one piece of the merged tensor.
_PIECE_BYTES = 1 << 20

#: Bytes up to which tensors of integers are compared before anything is written.
_CHECKED_BYTES = 1 << 16

#: Pieces after which freed memory goes back to the system.
_TRIM_EACH = 8

#: Surveys that are kept: reads of one tensor follow each other, but for those on the border of two.
_SURVEYS = 2


class PlacedTensor(Struct, frozen=True, kw_only=True, eq=False):
    """A merged tensor, and its place in the source."""

    merged: MergedTensor
    #: Its entry of each input, in the joined checkpoint.
    inputs: tuple[Entry, ...]
    first_byte: int

    @property
    def nbytes(self) -> int:
        """Bytes of the merged tensor."""
        return self.merged.numel * ITEM_BYTES[self.merged.out_dtype]


class MergeSource(ComputedSource):
    """Computes merged tensors; see ``Source``. Closing it ends its threads, not the inputs."""

    at_once = _AT_ONCE

    def __init__(self, path: str, inputs: OpenCheckpoint, tensors: Sequence[PlacedTensor]) -> None:
        """Read nothing yet.

        Args:
            path: Name for messages.
            inputs: All inputs as one checkpoint.
            tensors: The merged tensors, in the order of their places.
        """
        super().__init__(path, inputs, tensors[-1].first_byte + tensors[-1].nbytes if tensors else 0)
        self._tensors = tensors
        self._starts = [tensor.first_byte for tensor in tensors]
        #: Most host memory for whole tensors of all inputs and their sums.
        self.whole_bytes = max(
            (each.merged.numel * ITEM_BYTES[each.merged.dtype] * whole_tensors(each.merged) for each in tensors),
            default=0,
        )
        self.working_bytes = inputs.working_bytes + self.whole_bytes + (SCAN_STAGING_BYTES if self.whole_bytes else 0)
        self._turn = threading.BoundedSemaphore(1 if self.whole_bytes else _AT_ONCE)
        self._readers: list[CheckpointReader] = []
        self._lock = threading.Lock()
        self._known: OrderedDict[int, tuple[threading.Lock, list[Any]]] = OrderedDict()

    def check_integers(self) -> None:
        """Refuse what ``compute`` refuses; larger tensors of integers are compared when they are computed."""
        with self._reader() as reader:
            for each in self._tensors:  # read one at a time: all of them may be of integers
                if 0 < each.nbytes <= _CHECKED_BYTES and not getattr(torch, each.merged.dtype).is_floating_point:
                    compute(each.merged, next(_read(reader, [(each, 0, each.merged.numel)])), 0, None)

    def fill_buffer(self, offset: int, buffer: memoryview) -> None:
        """See ``RangedSource``."""
        with self._turn, self._reader() as reader:
            for batch in self._batches(offset, offset + len(buffer)):
                self._fill(reader, batch, offset, buffer)
            trim_heap()  # of temporary results

    def close(self) -> None:
        """End the threads that read."""
        with self._lock:
            readers, self._readers = self._readers, []
            self._known.clear()
        for reader in readers:
            reader.__exit__(None, None, None)

    @contextmanager
    def _reader(self) -> Iterator[CheckpointReader]:
        with self._lock:
            reader = self._readers.pop() if self._readers else CheckpointReader(self.inputs)
        try:
            yield reader
        finally:
            with self._lock:
                self._readers.append(reader)

    def _batches(self, offset: int, end: int) -> Iterator[list[tuple[int, int, int]]]:
        """Yield tensors and their elements that have bytes in a range, together as large as a piece."""
        batch: list[tuple[int, int, int]] = []
        nbytes = 0
        position = max(0, bisect_right(self._starts, offset) - 1)
        while position < len(self._tensors) and self._starts[position] < end:
            tensor = self._tensors[position]
            item = ITEM_BYTES[tensor.merged.out_dtype]
            first = max(0, offset - tensor.first_byte) // item
            last = -(-min(tensor.nbytes, end - tensor.first_byte) // item)
            while first < last:
                stop = min(last, first + max(1, (_PIECE_BYTES - nbytes) // item))
                batch.append((position, first, stop))
                nbytes += (stop - first) * item
                first = stop
                if nbytes >= _PIECE_BYTES:
                    yield batch
                    batch, nbytes = [], 0
            position += 1
        if batch:
            yield batch

    def _fill(
        self, reader: CheckpointReader, batch: Sequence[tuple[int, int, int]], offset: int, buffer: memoryview
    ) -> None:
        """Compute elements and copy their bytes to their place in a buffer that begins at ``offset``."""
        known = [self._survey(reader, position) for position, _, _ in batch]
        groups = _read(reader, [(self._tensors[position], first, end) for position, first, end in batch])
        for (position, first, _), tensors, own in zip(batch, groups, known, strict=True):
            placed = self._tensors[position]
            result = compute(placed.merged, tensors, first, own).contiguous()
            content: memoryview = result.view(torch.uint8).numpy().data
            at = placed.first_byte + first * result.element_size() - offset
            skipped = max(0, -at)
            content = content[skipped : max(skipped, len(buffer) - at)]
            buffer[at + skipped : at + skipped + len(content)] = content

    def _survey(self, reader: CheckpointReader, position: int) -> Any:
        """Return what a method has to know of the whole tensor; one thread finds it out, others wait."""
        with self._lock:
            entry = self._known.setdefault(position, (threading.Lock(), []))
            self._known.move_to_end(position)
            while len(self._known) > _SURVEYS:
                self._known.popitem(last=False)
        lock, found = entry
        with lock:
            if not found:
                placed = self._tensors[position]

                def read(first: int, end: int) -> list[torch.Tensor]:
                    if first % (_TRIM_EACH * (end - first)) == 0:
                        trim_heap()
                    return next(_read(reader, [(placed, first, end)]))

                found.append(survey(placed.merged, read))
            return found[0]


def _read(reader: CheckpointReader, pieces: Sequence[tuple[PlacedTensor, int, int]]) -> Iterator[list[torch.Tensor]]:
    """Yield the elements of all inputs of each piece, flat and in the dtype of the computation."""
    wanted = [(_covering(entry, first, end), first) for placed, first, end in pieces for entry in placed.inputs]
    tensors = iter(reader.read([entry for (entry, _), _ in wanted]))
    starts = iter([first - skipped for (_, skipped), first in wanted])
    for placed, first, end in pieces:
        dtype = getattr(torch, placed.merged.dtype)
        own = [next(tensors).reshape(-1)[next(starts) :][: end - first] for _ in placed.inputs]
        yield [tensor.to(dtype) for tensor in own]


def _covering(entry: Entry, first: int, end: int) -> tuple[Entry, int]:
    """Return the part of an entry with some of its elements, and the position of the first one that it has."""
    if not entry.parts and entry.stride == contiguous_stride(entry.shape):
        if (packing := entry.elements.packing) is not None:  # packs are decoded as a whole
            first, end = round_down(first, packing.elements), round_up(end, packing.elements)
        flat = replace(entry, shape=(end - first,), stride=(1,), storage_offset=entry.storage_offset + first)
        return flat, first
    if not entry.shape or 0 in entry.shape:
        return entry, 0
    row = torch.Size(entry.shape[1:]).numel()
    rows = slice(first // row, -(-end // row))
    return slice_entry(entry, rows), rows.start * row
