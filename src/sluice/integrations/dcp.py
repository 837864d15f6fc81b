"""``SluiceReader`` and ``SluiceWriter``: any checkpoint for ``torch.distributed.checkpoint``.

``dcp.load(state, storage_reader=SluiceReader("model.pth"))`` fills tensors and DTensors from every format and source
that sluice reads; each rank reads the bytes of its shards. With ``storage_writer=SluiceWriter("out.safetensors")``,
``dcp.save`` writes the ordinary files of ``sluice.save``.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from sluice._dtypes import torch_dtype
from sluice.api.checkpoint import Checkpoint
from sluice.api.checkpoint import open as open_checkpoint
from sluice.api.save import save
from sluice.checkpoint.open_checkpoint import CheckpointSource
from sluice.entries import tree as trees
from sluice.entries.slicing import slice_entry
from sluice.loading.module_fill import read_tree
from sluice.reading.composites import read_into
from sluice.records import Entry
from sluice.sources.remote.location import Remote
from sluice.writing.ranks.division import dtensors_in

__all__ = ["SluiceReader", "SluiceWriter"]

# ruff: noqa: ARG002, ARG003, FBT001  the signatures are those of torch


class _Explicit:
    """Base of reader and writer, which are passed explicitly and change no plan."""

    def prepare_local_plan(self, plan: Any) -> Any:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        """Return the plans unchanged."""
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: no path stands for a reader or a writer."""
        return False


class SluiceReader(_Explicit, StorageReader):
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
            if self._checkpoint is not None:
                self._checkpoint.close()
            self._source, self._checkpoint = checkpoint_id, None

    def read_metadata(self, *args: Any, **_: Any) -> Metadata:  # with "kwargs", torch tries again on one rank alone
        """Return shapes and dtypes; no tensor data is read."""
        found: dict[str, Any] = {}
        for name, leaf in _values(self._opened.index.tree):
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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the bytes that this rank asked for, with one plan.

        Raises:
            CheckpointError: A requested value is one that sluice does not build.
        """
        checkpoint, wanted, filled = self._opened, [], []
        values = dict(_values(checkpoint.index.tree))
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _as_bytes(checkpoint, name, values[name]))
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


def _values(tree: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield tensors and values by the names that the planners of torch give them."""
    if not isinstance(tree, trees.CONTAINERS) or _is_value(tree):
        yield name, tree
        return
    for key, child in trees.children(tree):
        yield from _values(child, f"{name}.{trees.component(key)}" if name else trees.component(key))


def _is_value(tree: object) -> bool:
    """Return whether a planner keeps it whole: a tuple, such as ``betas``, or a list without mappings and tensors."""
    if isinstance(tree, list):
        return not any(isinstance(child, (dict, Entry)) or not _is_value(child) for child in tree)
    return not isinstance(tree, dict)


def _as_bytes(checkpoint: Checkpoint, name: str, value: object) -> io.BytesIO:
    """Return what the planners of torch read a value from."""
    trees.refuse_opaques({name: value}, checkpoint.path)
    stream = io.BytesIO()
    torch.save(read_tree(checkpoint, value), stream)
    stream.seek(0)
    return stream


class SluiceWriter(_Explicit, StorageWriter):
    """Writes what ``dcp.save`` is given with ``sluice.save``: ordinary files, complete or not at all.

    Args:
        path: A path or address of ``sluice.save``.
        options: Keyword arguments of ``sluice.save``, such as ``dtype`` or ``max_shard_size``.

    Every rank writes what it holds, the coordinator a state without DTensors. The planner must be torch's default one.

    Example:
        >>> dcp.save(model.state_dict(), storage_writer=SluiceWriter("model.safetensors"))
    """

    def __init__(self, path: str | os.PathLike[str] | Remote, **options: Any) -> None:
        self._path = path
        self._options = {"overwrite": True, **options}
        self._coordinates = True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Write to another path from now on, if one is named."""
        self._path = checkpoint_id or self._path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember whether this rank writes what each rank has."""
        self._coordinates = is_coordinator

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Save the state that the planner has.

        Raises:
            SaveError: The format cannot hold it, or the operating system failed.
            TypeError: The planner is not a ``DefaultSavePlanner``.
        """
        if not isinstance(planner, DefaultSavePlanner):
            raise TypeError(f"{type(planner).__name__} is not a DefaultSavePlanner, whose state is saved")
        paths = {name: planner.mappings.get(name, (name,)) for name in planner.state_dict}
        state = unflatten_state_dict(planner.state_dict, paths)
        if self._coordinates or dtensors_in(state):
            save(state, self._path, **self._options)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing is left to do: the save has committed its files."""
