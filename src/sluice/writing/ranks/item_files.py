"""Write the items of a distributed checkpoint: each rank its own file, the lead the metadata as well."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from sluice.formats.distributed.metadata import ItemPlace
from sluice.sharding.dtensors import local_of
from sluice.writing.chunks import Staging
from sluice.writing.dcp_metadata import pickle_metadata
from sluice.writing.distributed_directory import write_distributed_directory
from sluice.writing.durable.shared_file import SharedFile
from sluice.writing.ranks.division import DividedTensor
from sluice.writing.ranks.group import LEAD, RankGroup
from sluice.writing.ranks.items import ItemLayout, OwnChunk, chunk_writer, lay_out_items
from sluice.writing.ranks.shared_writes import check_equal
from sluice.writing.torch_zip import TorchZipWriter
from sluice.writing.write_queue import WriteQueue, write_queue

__all__ = ["ItemFiles"]


class ItemFiles(Struct, frozen=True, kw_only=True):
    """The part of one rank in a distributed checkpoint."""

    #: The ranks.
    group: RankGroup
    #: The tensors of all ranks, by flat name.
    tensors: Mapping[str, DividedTensor]
    #: Tensors of this rank, by flat name: DTensors or plain ones.
    held: Mapping[str, torch.Tensor]
    #: Items of the values, by flat name; the same on every rank.
    values: Mapping[str, bytes]
    #: Path of each item in the saved object.
    paths: Mapping[str, tuple[str | int, ...]]
    #: Buffers of this rank.
    staging: Staging
    #: Called with the bytes of each written piece.
    wrote: Callable[[int], None]

    def write(self, directory: Path, *, overwrite: bool) -> list[Path]:
        """Write the checkpoint; return its files on the lead."""
        layout = lay_out_items(self.tensors, self.values)
        if self.group.position != LEAD:
            self._write_all(layout, {})
            return []

        def write(names: Mapping[int, str], hidden: Mapping[int, str]) -> bytearray:
            self._write_all(layout, hidden)
            values = {
                name: ItemPlace(file=names[LEAD], offset=offset, nbytes=len(self.values[name]))
                for name, offset in layout.values.items()
            }
            return pickle_metadata(layout.tensors(self.tensors, names), values, self.paths)

        return write_distributed_directory(directory, layout.sizes, overwrite=overwrite, write=write)

    def _write_all(self, layout: ItemLayout, hidden: Mapping[int, str]) -> None:
        """Have every rank write its file.

        Args:
            layout: The layout.
            hidden: Path of the file of each rank; empty but for the lead.
        """
        digest = hashlib.sha256(msgspec.json.encode((layout.sizes, self.paths)))
        for name, item in self.values.items():
            digest.update(name.encode())
            digest.update(item)
        created = self.group.exchange(lambda: msgspec.json.encode((hidden, digest.hexdigest())))
        everywhere, digests = zip(
            *(msgspec.json.decode(each, type=tuple[dict[int, str], str]) for each in created), strict=True
        )
        paths = everywhere[LEAD]
        self.group.hidden.extend(paths.values())
        check_equal(digests, "have different values in the object")
        self.group.exchange(partial(self._write, layout, paths.get(self.group.position)))

    def _write(self, layout: ItemLayout, path: str | None) -> bytes:
        if path is None:
            return b""
        rank = self.group.position
        with SharedFile(path) as file:
            file.reserve(layout.sizes[rank], self.staging.pool)
            if rank == LEAD:
                for name, offset in layout.values.items():
                    file.write_at(offset, self.values[name])
            with write_queue(layout.sizes[rank], self.staging, self.wrote) as queue:
                items = [self._write_chunk(file, queue, chunk) for chunk in layout.chunks.get(rank, ())]
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
