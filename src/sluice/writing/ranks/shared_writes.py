"""Write one file by all ranks: each writes the elements that it was assigned, at their places in the file.

The lead creates the files under hidden names and tells these to the others. Then all ranks write at once and make their
bytes durable.

Rows of a tensor are one run of bytes, columns a run for each row. Every run is one write, through the page cache unless
it is long. Writes of 4, 2 and 1 KiB took 4, 8 and 16 ms of processor time for 8 MiB. Exchanging columns for rows first
took 4 to 5 ms on gloo, and long writes another 3 to 4, without the packing: it is faster below about 2 KiB, where few
tensors are, and every exchange is one more step in which ranks wait for each other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch
from msgspec import Struct

from sluice._dtypes import ITEM_BYTES
from sluice._errors import SaveError
from sluice.sharding.dtensors import local_of
from sluice.sharding.regions import Region
from sluice.sharding.runs import Runs
from sluice.writing.chunks import Staging
from sluice.writing.durable.replacement import Replacement
from sluice.writing.durable.shared_file import SharedFile
from sluice.writing.ranks.division import DividedTensor
from sluice.writing.ranks.group import LEAD, RankGroup
from sluice.writing.safetensors import SafetensorsLayout
from sluice.writing.uploads import UploadedFile
from sluice.writing.write_queue import write_queue

__all__ = ["RankWriter", "check_equal"]


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

        def create() -> bytes:
            if out is None:
                return b""
            assert isinstance(out, Replacement)  # ranks save to file systems
            out.reserve(layout.nbytes)
            out.write_at(0, layout.header)
            return os.fsencode(out.hidden)

        def fill() -> bytes:
            if own:
                with SharedFile(path) as file:
                    file.reserve(layout.nbytes, self.staging.pool)
                    with write_queue(layout.nbytes, self.staging, self.wrote) as queue:
                        for name, region in own.items():
                            tensor = self.tensors[name]
                            part = _Part(file, tensor, region, starts[name])
                            queue.write(local_of(self.held[name]), tensor.dtype, part.first, part.put)
                    file.seal()
            return b""

        path = os.fsdecode(self.group.exchange(create)[LEAD])
        self.group.hidden.append(path)
        self.group.exchange(fill)


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


def check_equal(values: Sequence[object], problem: str) -> None:
    """Refuse values of ranks that differ; every rank has all of them, and raises the same error.

    Raises:
        SaveError: The first rank and another one have different values.
    """
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        advice = "Existing files are intact. Call save with the same arguments on every rank."
        raise SaveError(f"ranks 0 and {other} {problem}", advice=advice)
