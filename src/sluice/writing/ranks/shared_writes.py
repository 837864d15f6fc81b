"""Write one file by all ranks: each writes the elements that it was assigned, at their places in the file.

The lead creates the files under hidden names and tells these to the others. Then all ranks write at once and make their
bytes durable; no byte is written twice. A rank that finds that the save has failed removes the hidden names: the lead
cannot put the files in place then.

Rows of a tensor are one run of bytes, columns a run for each row. Every run is one write, through the page cache unless
it is long. Writes of 4, 2 and 1 KiB took 4, 8 and 16 ms of processor time for 8 MiB. Exchanging columns for rows first
took 4 to 5 ms on gloo, and long writes another 3 to 4, without the packing: it is faster below about 2 KiB, where few
tensors are, and every exchange is one more step in which ranks wait for each other.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Self, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec import Struct

from sluice import _defaults as defaults
from sluice._dtypes import ITEM_BYTES
from sluice._errors import SaveError
from sluice.engine.staging import StagingPool
from sluice.sharding.dtensors import local_of
from sluice.sharding.regions import Region, shape_of
from sluice.writing.durable.direct import write_all
from sluice.writing.durable.replacement import Replacement, WrittenFile, saving
from sluice.writing.ranks.division import DividedTensor
from sluice.writing.ranks.group import LEAD, RankGroup
from sluice.writing.safetensors import SafetensorsLayout
from sluice.writing.uploads import UploadedFile
from sluice.writing.write_queue import Staging, WriteQueue, write_queue

__all__ = ["Fill", "RankWriter", "Runs", "SharedFile"]

_Integers: TypeAlias = npt.NDArray[np.int64]

#: Most runs of one batch: three arrays of 128 KiB.
_BATCH = 1 << 14


class Runs:
    """The consecutive elements of a region in the row-major order of the whole tensor, which is that of the file.

    A rank holds the elements of its region in row-major order of the region: one run for rows, a run for each row of
    columns. Runs are numbered in the order of the region, and computed in batches, because a region of a single column
    has as many runs as elements.

    Example:
        >>> [starts.tolist() for starts, counts in Runs((2, 4), (((0, 2),), ((1, 3),))).within(0, 4)]
        [[1, 5]]
    """

    def __init__(self, shape: Sequence[int], region: Region) -> None:
        """Prepare to compute runs.

        Args:
            shape: Shape of the whole tensor.
            region: A region of it.
        """
        #: Number of elements of the region.
        self.elements = prod(shape_of(region))
        cut = [dim for dim, size in enumerate(shape) if region[dim] != ((0, size),)]
        last = cut[-1] if cut else 0
        inner = prod(shape[last + 1 :])
        intervals = region[last] if region else ((0, 1),)
        self._starts = np.array([start * inner for start, _ in intervals], np.int64)
        self._ends = np.cumsum([(stop - start) * inner for start, stop in intervals], dtype=np.int64)
        self._row = int(self._ends[-1]) if len(self._ends) else 0
        # Position in the tensor of each selected index of the dimensions before the last one that is cut.
        self._outer = [
            np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in region[dim]])
            * prod(shape[dim + 1 :])
            for dim in range(last if self.elements else 0)
        ]

    def within(self, first: int, last: int) -> Iterator[tuple[_Integers, _Integers]]:
        """Yield the runs of some elements, in batches: first elements in the tensor, and numbers of elements.

        Args:
            first: Number of the first element, in row-major order of the region.
            last: One past the number of the last element.
        """
        if first >= last:
            return
        count = len(self._ends)
        begin, end = self._run_of(first), self._run_of(last - 1) + 1
        for number in range(begin, end, _BATCH):
            runs = np.arange(number, min(number + _BATCH, end), dtype=np.int64)
            rows, kinds = runs // count, runs % count
            stops = rows * self._row + self._ends[kinds]
            starts = rows * self._row + np.where(kinds, self._ends[kinds - 1], 0)
            skipped = np.maximum(first - starts, 0)
            counts = np.minimum(stops, last) - starts - skipped
            yield self._starts[kinds] + self._offsets(rows) + skipped, counts

    def _run_of(self, element: int) -> int:
        row, rest = divmod(element, self._row)
        return row * len(self._ends) + int(np.searchsorted(self._ends, rest, side="right"))

    def _offsets(self, rows: _Integers) -> _Integers:
        """Return the position in the tensor of each row: a combination of indices of the outer dimensions."""
        offsets = np.zeros(len(rows), np.int64)
        for positions in reversed(self._outer):
            rows, index = np.divmod(rows, len(positions))
            offsets += positions[index]
        return offsets


class SharedFile(WrittenFile):
    """A file that the lead has created: opened when its ``with`` block begins, closed after it."""

    def __enter__(self) -> Self:
        flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_NOFOLLOW", 0)
        with saving(self.path):
            try:
                self._descriptor = os.open(self.path, flags)
            except OSError as error:
                if error.errno not in {errno.ENOENT, errno.ESTALE}:
                    raise
                raise SaveError(
                    "this rank does not see the file that the first rank has created",
                    file=self.path,
                    advice="Existing files are intact. Save to a file system that all ranks share.",
                ) from error
        return self

    def reserve(self, nbytes: int, staging: StagingPool | None = None) -> None:
        """Prepare to write a large file around the page cache; its creator has reserved the space."""
        self._bypass_cache(self.path, nbytes, staging)

    def write_runs(self, offsets: Sequence[int], sizes: Sequence[int], data: memoryview) -> None:
        """Write consecutive pieces of ``data`` to different places. Thread-safe.

        Args:
            offsets: First byte in the file of each piece.
            sizes: Size of each piece, in bytes.
            data: All pieces.
        """
        at = 0
        with saving(self.path):
            for offset, nbytes in zip(offsets, sizes, strict=True):
                piece = data[at : at + nbytes]
                at += nbytes
                # Shorter pieces would fill the list of short writes, which is made for the edges of long ones.
                if self._direct is not None and nbytes >= defaults.DIRECT_WRITE_BYTES:
                    self._direct.write(offset, piece)
                else:
                    write_all(self._descriptor, offset, piece)


#: Queues the bytes of this rank in a file.
Fill = Callable[[SharedFile, WriteQueue], None]


class RankWriter(Struct, frozen=True, kw_only=True):
    """The part of one rank in a save."""

    #: The ranks.
    group: RankGroup
    #: The tensors of all ranks, by name.
    tensors: Mapping[str, DividedTensor]
    #: Tensors of this rank, by name: DTensors or plain ones.
    held: Mapping[str, torch.Tensor]
    #: Buffers of this rank.
    staging: Staging
    #: Called with the bytes of each written piece.
    wrote: Callable[[int], None]

    def write(self, layout: SafetensorsLayout, out: Replacement | UploadedFile | None) -> None:
        """Write the tensors of one file, which the lead puts in place.

        Args:
            layout: The file; the same on every rank.
            out: The file on the lead; None on other ranks.

        Raises:
            RankError: A rank failed.
        """
        starts = {name: start for name, _, start in layout.tensors}
        parts = {name: self.tensors[name].of(self.group.position) for name in starts}
        own = {name: region for name, region in parts.items() if region is not None}

        def create() -> dict[int, bytes]:
            if out is None:
                return {}
            assert isinstance(out, Replacement)  # ranks save to file systems
            out.reserve(layout.nbytes)
            out.write_at(0, layout.header)
            return dict.fromkeys(range(self.group.size), os.fsencode(out.hidden))

        def fill(file: SharedFile, queue: WriteQueue) -> None:
            for name, region in own.items():
                tensor = self.tensors[name]
                part = _Part(file, tensor, region, starts[name])
                queue.write(local_of(self.held[name]), tensor.dtype, part.first, part.put)

        self.write_files(create, layout.nbytes, fill if own else None)

    def write_files(self, create: Callable[[], dict[int, bytes]], nbytes: int, fill: Fill | None) -> None:
        """Have every rank write to its file.

        Args:
            create: Returns the hidden path of the file of each rank, on the lead; as bytes, it need not be UTF-8.
            nbytes: Size of the file of this rank, in bytes.
            fill: Queues what this rank writes; None if that is nothing.

        Raises:
            RankError: A rank failed.
        """
        created = self.group.exchange(lambda: msgspec.msgpack.encode(create()))
        paths = msgspec.msgpack.decode(created[LEAD], type=dict[int, bytes])
        self.group.hidden.extend(map(os.fsdecode, set(paths.values())))
        self.group.exchange(partial(self._write, os.fsdecode(paths.get(self.group.position, b"")), nbytes, fill))

    def _write(self, path: str, nbytes: int, fill: Fill | None) -> bytes:
        if fill is not None:
            with SharedFile(path) as file:
                file.reserve(nbytes, self.staging.pool)
                with write_queue(nbytes, self.staging, self.wrote) as queue:
                    fill(file, queue)
                file.seal()
        return b""


class _Part:
    """The elements of a tensor that one rank writes, and their places in a file."""

    def __init__(self, file: SharedFile, tensor: DividedTensor, region: Region, start: int) -> None:
        self._file = file
        self._runs = Runs(tensor.shape, region)
        self._item = ITEM_BYTES[tensor.dtype]
        self._start = start
        starts, _ = next(self._runs.within(0, 1))
        #: First byte in the file.
        self.first = start + int(starts[0]) * self._item

    def put(self, at: int, piece: memoryview) -> None:
        """Write a piece of the elements, of which ``at`` is the first byte. Thread-safe."""
        item, done = self._item, 0
        for starts, counts in self._runs.within(at // item, (at + len(piece)) // item):
            offsets, sizes = starts * item, counts * item
            nbytes = int(sizes.sum())
            self._file.write_runs((offsets + self._start).tolist(), sizes.tolist(), piece[done : done + nbytes])
            done += nbytes
