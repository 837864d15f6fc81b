"""Write the items of a distributed checkpoint: each rank its own file, the lead the metadata as well."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from sluice.sharding.dtensors import local_of
from sluice.writing.chunks import Staging
from sluice.writing.durable.shared_file import SharedFile
from sluice.writing.ranks.dcp_metadata import pickle_metadata
from sluice.writing.ranks.distributed_directory import write_distributed_directory
from sluice.writing.ranks.division import DividedTensor
from sluice.writing.ranks.group import LEAD, RankGroup
from sluice.writing.ranks.items import ItemLayout, OwnChunk, chunk_writer
from sluice.writing.torch_zip import TorchZipWriter
from sluice.writing.write_queue import WriteQueue, write_queue

__all__ = ["ItemFiles"]


class ItemFiles(Struct, frozen=True, kw_only=True):
    """The part of one rank in a distributed checkpoint."""

    #: The ranks.
    group: RankGroup
    #: The tensors of all ranks, by flat name.
    tensors: Mapping[str, DividedTensor]
    #: The places of all items; the same on every rank.
    layout: ItemLayout
    #: Tensors of this rank, by flat name: DTensors or plain ones.
    held: Mapping[str, torch.Tensor]
    #: Items of the values of this rank, by flat name.
    values: Mapping[str, bytes]
    #: Path of each item in the saved object.
    paths: Mapping[str, Sequence[str | int]]
    #: Buffers of this rank.
    staging: Staging
    #: Called with the bytes of each written piece.
    wrote: Callable[[int], None]

    def write(self, directory: Path, *, overwrite: bool) -> list[Path]:
        """Write the checkpoint; return its files on the lead."""
        if self.group.position != LEAD:
            self._write_all({})
            return []

        def write(names: Mapping[int, str], hidden: Mapping[int, str]) -> bytes:
            self._write_all(hidden)
            return pickle_metadata(self.tensors, self.layout, self.paths, names)

        return write_distributed_directory(directory, self.layout.sizes, overwrite=overwrite, write=write)

    def _write_all(self, hidden: Mapping[int, str]) -> None:
        """Have every rank write its file; ``hidden`` are the paths of all files, on the lead."""
        created = self.group.exchange(lambda: msgspec.json.encode(hidden))
        paths = msgspec.json.decode(created[LEAD], type=dict[int, str])
        self.group.hidden.extend(paths.values())
        self.group.exchange(partial(self._write, paths.get(self.group.position)))

    def _write(self, path: str | None) -> bytes:
        if path is None:
            return b""
        rank = self.group.position
        nbytes = self.layout.sizes[rank]
        with SharedFile(path) as file:
            file.reserve(nbytes, self.staging.pool)
            for name, place in self.layout.values.items():
                if place.rank == rank:
                    file.write_at(place.offset, self.values[name])
            with write_queue(nbytes, self.staging, self.wrote) as queue:
                items = [self._write_chunk(file, queue, chunk) for chunk in self.layout.chunks.get(rank, ())]
            for item, writer in items:
                writer.finish(item)
            file.seal()
        return b""

    def _write_chunk(self, file: SharedFile, queue: WriteQueue, chunk: OwnChunk) -> tuple[_Item, TorchZipWriter]:
        tensor = self.tensors[chunk.name]
        start, shape = chunk.box
        item, writer = _Item(file, chunk.offset), chunk_writer(tensor.dtype, shape)
        if 0 not in shape:
            own = local_of(self.held[chunk.name])[
                tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
            ]
            queue.write(own, tensor.dtype, chunk.offset + writer.offset(0), partial(writer.write, item, 0))
        return item, writer


class _Item:
    """The bytes of one item in a file."""

    def __init__(self, file: SharedFile, offset: int) -> None:
        self._file = file
        self._offset = offset

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        self._file.write_at(self._offset + offset, data)
