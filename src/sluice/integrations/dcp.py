"""``SluiceReader``: any checkpoint for ``torch.distributed.checkpoint``.

``dcp.load(state, storage_reader=SluiceReader("model.pth"))`` fills tensors and DTensors from every format and source
that sluice reads; each rank reads the bytes of its shards. ``sluice.save`` writes ordinary files of what ranks hold.
"""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from sluice._dtypes import torch_dtype
from sluice._errors import UnsupportedError
from sluice.api.checkpoint import Checkpoint
from sluice.api.checkpoint import open as open_checkpoint
from sluice.checkpoint.open_checkpoint import CheckpointSource
from sluice.entries import tree as trees
from sluice.entries.slicing import slice_entry
from sluice.reading.tensor import read_into
from sluice.records import Entry

__all__ = ["SluiceReader"]

# ruff: noqa: ARG002, ARG003, FBT001  the signatures are those of torch


class SluiceReader(StorageReader):
    """Reads a checkpoint for ``dcp.load``. Names are dotted paths, as in ``sluice.open``.

    Args:
        source: Any source of ``sluice.open``: a path, a directory, a URL.
        key: Part of it, such as ``"model"``.

    Example:
        >>> state = {"model": model.state_dict()}
        >>> dcp.load(state, storage_reader=SluiceReader("run.pt"))
    """

    def __init__(self, source: CheckpointSource, *, key: str | None = None) -> None:
        self._source = source
        self._key = key
        self._checkpoint: Checkpoint | None = None

    @property
    def _opened(self) -> Checkpoint:
        if self._checkpoint is None:
            self._checkpoint = open_checkpoint(self._source, key=self._key)
        return self._checkpoint

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Read another checkpoint from now on, if one is named."""
        if checkpoint_id:
            self._source, self._checkpoint = checkpoint_id, None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return shapes and dtypes; no tensor data is read."""
        found: dict[str, Any] = {}
        for name, leaf in trees.leaves(self._opened.index.tree):
            if not isinstance(leaf, Entry):
                found[name] = BytesStorageMetadata()
                continue
            size = torch.Size(leaf.shape)
            chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
            properties = TensorProperties(dtype=torch_dtype(leaf.dtype))
            found[name] = TensorStorageMetadata(properties=properties, size=size, chunks=[chunk])
        return Metadata(state_dict_metadata=found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing has to be prepared."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the bytes that this rank asked for, with one plan.

        Raises:
            UnsupportedError: A requested value is not plain data in the checkpoint.
        """
        checkpoint, wanted, filled = self._opened, [], []
        values = dict(trees.leaves(checkpoint.index.tree))
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _as_bytes(values[name], name, checkpoint.path))
                continue
            box = tuple(slice(at, at + n) for at, n in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item)
            wanted.append((name, slice_entry(checkpoint[name].entry, box), target.detach()))
            filled.append((item, target))
        if wanted:
            read_into(checkpoint, wanted)
        for item, target in filled:
            planner.commit_tensor(item, target)
        checkpoint.close()
        self._checkpoint = None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a reader is always passed explicitly."""
        return False


def _as_bytes(value: object, name: str, file: str) -> io.BytesIO:
    """Return what the planners of torch read a value from."""
    if not isinstance(value, (int, float, str, bytes, type(None))):
        raise UnsupportedError("the value is not plain data", file=file, tensor=name, found=type(value).__name__)
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream
