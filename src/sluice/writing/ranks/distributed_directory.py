"""Directories of torch.distributed.checkpoint: a data file of each writing rank, and ``.metadata``, which commits them.

Each rank writes the items of its own file, and the lead the metadata as well: torch's records, pickled as torch does.

A crash at any moment leaves the old checkpoint or the new one: new data files get names that no file has, the rename of
``.metadata`` is the step that makes them the checkpoint, and data files that only the old one needs are removed last.
The next save with ``overwrite=True`` removes data files of a save that was killed.
"""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from sluice._dtypes import torch_dtype
from sluice._errors import SaveError
from sluice.checkpoint.open_file import METADATA_FILE
from sluice.sharding.dtensors import local_of
from sluice.writing.durable.directories import locked_directory, publish_set
from sluice.writing.durable.partial_files import hidden_stem, saving
from sluice.writing.durable.replacement import Replacement
from sluice.writing.ranks.division import Box, DividedTensor
from sluice.writing.ranks.group import LEAD
from sluice.writing.ranks.items import ItemLayout, chunk_writer
from sluice.writing.ranks.shared_writes import RankWriter, SharedFile
from sluice.writing.shards import remove_files
from sluice.writing.write_queue import WriteQueue

__all__ = ["write_item_files"]

#: Names of data files: those of torch, and those with a token, used if the usual ones exist.
_DATA = re.compile(r"__\d+_(\d+|[0-9a-f]{8})\.distcp")

#: Version of the format that torch writes.
_VERSION = "1.0.0"


def write_item_files(
    ranks: RankWriter,
    layout: ItemLayout,
    values: Mapping[str, bytes],
    paths: Mapping[str, Sequence[str | int]],
    directory: Path,
    *,
    overwrite: bool,
) -> tuple[list[str], tuple[str, ...]]:
    """Write a checkpoint; return its files and those of the old one, on the lead.

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
        finishers = [
            _write_chunk(ranks, file, queue, name, own, place.offset)
            for name, chunks in layout.stored.items()
            for _, own, place in chunks
            if place.rank == rank
        ]
        queue.drain()
        for finish in finishers:
            finish()

    def write_all(hidden: Mapping[int, bytes]) -> None:
        nbytes = layout.sizes.get(rank)
        ranks.write_files(lambda: dict(hidden), nbytes or 0, None if nbytes is None else fill)

    def write(names: Mapping[int, str], hidden: Mapping[int, bytes]) -> bytes:
        write_all(hidden)
        return _pickle_metadata(ranks.tensors, layout, paths, names)

    if rank == LEAD:
        return _write_directory(directory, layout.sizes, overwrite=overwrite, write=write)
    write_all({})
    return [], ()


def _write_chunk(
    ranks: RankWriter, file: SharedFile, queue: WriteQueue, name: str, own: Box, offset: int
) -> Callable[[], object]:
    """Queue the elements of a chunk at an offset; return what writes the rest of its item, after them."""
    tensor = ranks.tensors[name]
    start, shape = own
    writer = chunk_writer(tensor.dtype, shape)

    def write_at(at: int, data: bytes | bytearray | memoryview) -> None:
        file.write_at(offset + at, data)

    if 0 not in shape:
        box = tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))
        elements = local_of(ranks.held[name])[box]
        queue.write(elements, tensor.dtype, offset + writer.offset(0), partial(writer.write, write_at, 0))
    return partial(writer.finish, write_at)


def _write_directory(
    directory: Path,
    sizes: Mapping[int, int],
    *,
    overwrite: bool,
    write: Callable[[Mapping[int, str], Mapping[int, bytes]], bytes],
) -> tuple[list[str], tuple[str, ...]]:
    """Write a checkpoint and return its files, ``.metadata`` last, and those of the old one.

    Args:
        directory: The destination; created if it does not exist.
        sizes: Size of the data file of each writing rank, in bytes.
        overwrite: Whether an existing checkpoint may be replaced.
        write: Has the ranks write their files and make them durable, and returns the content of ``.metadata``. Called
            with the final name and the hidden path of the file of each rank.

    Raises:
        SaveError: The checkpoint was not written; an existing one is intact.
    """
    with locked_directory(str(directory)) as locked:
        with saving(str(directory)):
            existing = os.listdir(directory)
        if METADATA_FILE in existing and not overwrite:
            problem = "the directory already contains a checkpoint; pass overwrite=True to replace it"
            raise SaveError(problem, file=str(directory), found=METADATA_FILE)
        remove_files(directory, [name for name in existing if locked and hidden_stem(name, in_set=True) is not None])
        names = _names(sizes, existing)
        with ExitStack() as stack:
            files = {}
            for rank, name in names.items():
                files[rank] = stack.enter_context(Replacement(directory / name, overwrite=True, in_set=True))
                files[rank].reserve(sizes[rank])
                files[rank].close()  # the rank writes to it and seals it
            content = write(names, {rank: os.fsencode(file.hidden) for rank, file in files.items()})
            metadata = stack.enter_context(Replacement(directory / METADATA_FILE, overwrite=True, in_set=True))
            metadata.write_at(0, content)
            metadata.seal(nbytes=len(content))
            publish_set(str(directory), list(files.values()), metadata.publish, lambda: metadata.is_published)
        old = [name for name in existing if overwrite and _DATA.fullmatch(name)]
        remove_files(directory, old)
    old += [METADATA_FILE] if METADATA_FILE in existing else []
    written = [str(directory / name) for name in (*names.values(), METADATA_FILE)]
    return written, tuple(str(directory / name) for name in old)


def _names(ranks: Mapping[int, int], existing: list[str]) -> dict[int, str]:
    usual = {rank: f"__{rank}_0.distcp" for rank in ranks}
    if not set(usual.values()) & set(existing):
        return usual
    token = secrets.token_hex(4)
    return {rank: f"__{rank}_{token}.distcp" for rank in ranks}


def _pickle_metadata(
    tensors: Mapping[str, DividedTensor],
    layout: ItemLayout,
    paths: Mapping[str, Sequence[str | int]],
    files: Mapping[int, str],
) -> bytes:
    """Return the content of the file.

    Args:
        tensors: The tensors, by flat name.
        layout: The places of their chunks, and of the items of other values.
        paths: Path of each item in the saved object, by flat name.
        files: Name of the file of each rank.
    """
    # Here, not above: the import takes half a second.
    from torch.distributed.checkpoint import metadata as records
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    def place(rank: int, offset: int, nbytes: int) -> object:
        return _StorageInfo(relative_path=files[rank], offset=offset, length=nbytes)

    described: dict[str, object] = {}
    places = {records.MetadataIndex(name): place(*item) for name, item in layout.values.items()}
    for name in paths:
        if name not in tensors:
            described[name] = records.BytesStorageMetadata()
            continue
        chunks = []
        for (start, shape), _, item in layout.stored[name]:
            offsets = torch.Size(start)
            chunks.append(records.ChunkStorageMetadata(offsets=offsets, sizes=torch.Size(shape)))
            places[records.MetadataIndex(name, offsets)] = place(*item)
        described[name] = records.TensorStorageMetadata(
            properties=records.TensorProperties(dtype=torch_dtype(tensors[name].dtype)),
            size=torch.Size(tensors[name].shape),
            chunks=chunks,
        )
    own = {name: tuple(path) for name, path in paths.items()}
    known = {field.name for field in dataclasses.fields(records.Metadata)}
    version = {"version": _VERSION} if "version" in known else {}  # torch 2.6 writes none
    return pickle.dumps(
        records.Metadata(described, planner_data=own, storage_data=places, **version)  # type: ignore[arg-type]
    )
