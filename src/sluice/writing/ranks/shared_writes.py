"""Write one file by all ranks: each writes the elements that it was assigned, at their places in the file.

The lead creates the files under hidden names and tells these to the others. Then all ranks write at once and make their
bytes durable.

Rows of a tensor are one run of bytes, columns a run for each row. Every run is one write, through the page cache unless
it is long. Writes of 4, 2 and 1 KiB took 4, 8 and 16 ms of processor time for 8 MiB. Exchanging columns for rows first
took 4 to 5 ms on gloo, and long writes another 3 to 4, without the packing: it is faster below about 2 KiB, where few
tensors are, and every exchange is one more step in which ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import msgspec
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
from sluice.writing.write_queue import WriteQueue, write_queue

__all__ = ["Fill", "RankWriter", "check_equal", "disagreement"]

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

        def create() -> dict[int, str]:
            if out is None:
                return {}
            assert isinstance(out, Replacement)  # ranks save to file systems
            out.reserve(layout.nbytes)
            out.write_at(0, layout.header)
            return dict.fromkeys(range(self.group.size), out.hidden)

        def fill(file: SharedFile, queue: WriteQueue) -> None:
            for name, region in own.items():
                tensor = self.tensors[name]
                part = _Part(file, tensor, region, starts[name])
                queue.write(local_of(self.held[name]), tensor.dtype, part.first, part.put)

        self.write_files(create, layout.nbytes, fill if own else None)

    def write_files(self, create: Callable[[], dict[int, str]], nbytes: int, fill: Fill | None) -> None:
        """Have every rank write to its file.

        Args:
            create: Returns the hidden path of the file of each rank, on the lead.
            nbytes: Size of the file of this rank, in bytes.
            fill: Queues what this rank writes; None if that is nothing.

        Raises:
            RankError: A rank failed.
        """
        created = self.group.exchange(lambda: msgspec.json.encode(create()))
        paths = msgspec.json.decode(created[LEAD], type=dict[int, str])
        self.group.hidden.extend(set(paths.values()))
        self.group.exchange(partial(self._write, paths.get(self.group.position, ""), nbytes, fill))

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


def check_equal(values: Sequence[object], problem: str) -> None:
    """Refuse values of ranks that differ; every rank has all of them, and raises the same error.

    Raises:
        SaveError: The first rank and another one have different values.
    """
    other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
    if other is not None:
        raise disagreement(0, other, problem)


def disagreement(rank: int, other: int, problem: str, name: str | None = None) -> SaveError:
    """Return the error of two ranks whose objects do not fit together; ``name`` is that of a value in them."""
    return SaveError(
        f"ranks {rank} and {other} {problem}",
        tensor=name,
        advice="Existing files are intact. Call save with the same arguments on every rank, and keep values that "
        "differ between ranks, such as random states, in files of their own.",
    )
