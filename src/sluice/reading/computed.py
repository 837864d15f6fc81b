"""A file of tensors that are computed, each as a whole, when they are read; it is added to a checkpoint."""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import NamedTuple

import torch
from msgspec.structs import replace

from sluice._threads import close_dropped
from sluice.checkpoint.open_checkpoint import OpenCheckpoint
from sluice.checkpoint.open_file import OpenFile
from sluice.formats.protocol import LocatedByIndex
from sluice.machine.processes import trim_heap
from sluice.records import Entry, FileRecord, Storage, elements_of
from sluice.records.geometry import contiguous_stride, round_up
from sluice.sources.ranges import ComputedSource

__all__ = ["WholeTensor", "WholeTensors"]

#: Bytes to which the first of each tensor is aligned.
_ALIGNMENT = 64


class WholeTensor(NamedTuple):
    """A computed tensor."""

    name: str
    #: Its dtype, and otherwise what it is like.
    dtype: str
    like: Entry
    #: Returns it, row-major and on the host.
    compute: Callable[[], torch.Tensor]


class WholeTensors(ComputedSource):
    """Computes one tensor at a time, and holds the one that is being read."""

    def __init__(
        self, path: str, inputs: OpenCheckpoint, tensors: Sequence[WholeTensor], *, keep: bool = False
    ) -> None:
        """Compute nothing yet; ``keep`` also holds a tensor whose last byte was read: it may be read several times."""
        self._entries = [
            replace(
                tensor.like,
                elements=elements_of(tensor.dtype),
                stride=contiguous_stride(tensor.like.shape),
                storage_offset=0,
                parts=(),
            )
            for tensor in tensors
        ]
        self._starts = list(accumulate((round_up(entry.nbytes, _ALIGNMENT) for entry in self._entries), initial=0))
        super().__init__(path, inputs, self._starts[-1])
        #: Closed with it: further files and readers.
        self.closing = ExitStack()
        weakref.finalize(self, close_dropped, self.closing).atexit = False  # of a checkpoint that was never closed
        self._tensors, self._keep = tensors, keep
        self._lock = threading.Lock()
        #: Position and bytes of the tensor that is being read.
        self._held: tuple[int, memoryview] | None = None

    def added_to(self, base: OpenCheckpoint) -> tuple[OpenCheckpoint, list[Entry]]:
        """Return a checkpoint with this file, whose tree is that of the base, and the entries of the tensors."""
        index, first = base.index, len(base.index.storages)
        storages = tuple(
            Storage(file=len(index.files), offset=start, nbytes=entry.nbytes, key=tensor.name)
            for tensor, entry, start in zip(self._tensors, self._entries, self._starts, strict=False)
        )
        whole = replace(
            index,
            files=(*index.files, FileRecord(path=self.path, identity=self.identity)),
            storages=(*index.storages, *storages),
            crcs=[*index.crcs, *(0 for _ in storages)] if index.crcs else (),
            end=None,
        )
        own = replace(whole, storages=storages, tree=None, crcs=())
        file = OpenFile(source=self, locator=LocatedByIndex(), index=own, first_storage=first)
        opened = OpenCheckpoint(base.path, whole, (*base.open_files, file), base.limits, base.place)
        return opened, [replace(entry, storage=first + number) for number, entry in enumerate(self._entries)]

    def fill_buffer(self, offset: int, buffer: memoryview) -> None:
        """See ``RangedSource``."""
        end = offset + len(buffer)
        with self._lock:
            for position in range(bisect_right(self._starts, offset) - 1, bisect_left(self._starts, end)):
                start = self._starts[position]
                piece = self._whole(position)[max(0, offset - start) : end - start]
                at = max(0, start - offset)
                buffer[at : at + len(piece)] = piece
                del piece
                if not self._keep and start + self._entries[position].nbytes <= end:
                    self._free()

    def _whole(self, position: int) -> memoryview:
        if self._held is None or self._held[0] != position:
            self._held = None
            whole = self._tensors[position].compute()
            self._held = position, whole.detach().reshape(-1).view(torch.uint8).numpy().data
            trim_heap()  # of temporary results
        return self._held[1]

    def _free(self) -> None:
        self._held = None
        trim_heap()

    def close(self) -> None:
        """Free the tensor that was read last."""
        self._free()
        self.closing.close()
