"""Write the items of a distributed checkpoint: each rank its own file, the lead the metadata as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from sluice.sharding.dtensors import local_of
from sluice.writing.durable.shared_file import SharedFile
from sluice.writing.ranks.dcp_metadata import pickle_metadata
from sluice.writing.ranks.distributed_directory import write_distributed_directory
from sluice.writing.ranks.group import LEAD
from sluice.writing.ranks.items import ItemLayout, OwnChunk, chunk_writer
from sluice.writing.ranks.shared_writes import RankWriter
from sluice.writing.torch_zip import TorchZipWriter
from sluice.writing.write_queue import WriteQueue

__all__ = ["write_item_files"]


def write_item_files(
    ranks: RankWriter,
    layout: ItemLayout,
    values: Mapping[str, bytes],
    paths: Mapping[str, Sequence[str | int]],
    directory: Path,
    *,
    overwrite: bool,
) -> list[Path]:
    """Write a checkpoint; return its files on the lead.

    Args:
        ranks: The part of this rank.
        layout: The places of all items; the same on every rank.
        values: Items of the values of this rank, by flat name.
        paths: Path of each item in the saved object.
        directory: The destination.
        overwrite: Whether an existing checkpoint may be replaced.
    """
    rank = ranks.group.position

    def fill(file: SharedFile, queue: WriteQueue) -> None:
        for name, place in layout.values.items():
            if place.rank == rank:
                file.write_at(place.offset, values[name])
        items = [_write_chunk(ranks, file, queue, chunk) for chunk in layout.chunks.get(rank, ())]
        queue.drain()
        for item, writer in items:
            writer.finish(item)

    def write_all(hidden: Mapping[int, str]) -> None:
        nbytes = layout.sizes.get(rank)
        ranks.write_files(lambda: dict(hidden), nbytes or 0, None if nbytes is None else fill)

    def write(names: Mapping[int, str], hidden: Mapping[int, str]) -> bytes:
        write_all(hidden)
        return pickle_metadata(ranks.tensors, layout, paths, names)

    if rank == LEAD:
        return write_distributed_directory(directory, layout.sizes, overwrite=overwrite, write=write)
    write_all({})
    return []


def _write_chunk(
    ranks: RankWriter, file: SharedFile, queue: WriteQueue, chunk: OwnChunk
) -> tuple[_Item, TorchZipWriter]:
    tensor = ranks.tensors[chunk.name]
    start, shape = chunk.box
    item, writer = _Item(file, chunk.offset), chunk_writer(tensor.dtype, shape)
    if 0 not in shape:
        box = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        own = local_of(ranks.held[chunk.name])[box]
        queue.write(own, tensor.dtype, chunk.offset + writer.offset(0), partial(writer.write, item, 0))
    return item, writer


class _Item:
    """The bytes of one item in a file."""

    def __init__(self, file: SharedFile, offset: int) -> None:
        self._file = file
        self._offset = offset

    def write_at(self, offset: int, data: bytes | bytearray | memoryview) -> None:
        self._file.write_at(self._offset + offset, data)
