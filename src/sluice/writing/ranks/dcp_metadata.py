"""The ``.metadata`` file of a torch.distributed.checkpoint directory: torch's own records, pickled as torch does."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Mapping, Sequence

import torch

from sluice._dtypes import torch_dtype
from sluice.writing.ranks.division import DividedTensor
from sluice.writing.ranks.items import ItemLayout

__all__ = ["pickle_metadata"]

#: Version of the format that torch writes.
_VERSION = "1.0.0"


def pickle_metadata(
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
        for (start, shape), item in layout.stored[name]:
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
