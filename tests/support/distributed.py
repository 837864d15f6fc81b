"""Distributed checkpoints for tests, and reading them with torch."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

import sluice
from sluice._dtypes import dtype_name
from sluice.entries import tree as trees
from support.hostile_archives import (
    chunk_metadata,
    distributed_metadata,
    index_key,
    place,
    tensor_metadata,
    value_metadata,
)
from support.torch_files import saved

Box = tuple[tuple[int, ...], tuple[int, ...]]

_FIRST_FILE = "__0_0.distcp"


@dataclass(frozen=True, kw_only=True)
class StoredChunk:
    """A chunk of a tensor, stored as an item of its own: the bytes of a ``torch.save`` file."""

    start: tuple[int, ...]
    shape: tuple[int, ...]
    item: bytes
    file: str = _FIRST_FILE


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor and its chunks."""

    shape: tuple[int, ...]
    chunks: Sequence[StoredChunk]
    dtype: str = "float32"


def item(value: object) -> bytes:
    """Return a value as an item of a distributed checkpoint."""
    return saved(value.clone() if isinstance(value, torch.Tensor) else value)


def chunks(whole: torch.Tensor, boxes: Iterable[Box], *, files: int = 1) -> StoredTensor:
    """Return a tensor cut into boxes, which are spread over files."""
    stored = []
    for number, (start, shape) in enumerate(boxes):
        part = whole[tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))]
        stored.append(StoredChunk(start=start, shape=shape, item=item(part), file=f"__{number % files}_0.distcp"))
    return StoredTensor(shape=tuple(whole.shape), dtype=dtype_name(whole.dtype), chunks=stored)


def rows(whole: torch.Tensor, count: int, *, files: int = 1) -> StoredTensor:
    """Return a tensor cut into ``count`` chunks of equal rows."""
    step = whole.shape[0] // count
    boxes = [((first, *[0] * (whole.dim() - 1)), (step, *whole.shape[1:])) for first in range(0, whole.shape[0], step)]
    return chunks(whole, boxes, files=files)


def write(
    directory: Path,
    tensors: Mapping[str, StoredTensor],
    values: Mapping[str, object] | None = None,
    *,
    paths: Mapping[str, tuple[object, ...]] | None = None,
) -> Path:
    """Write a directory; values other than bytes are saved by torch."""
    directory.mkdir(parents=True, exist_ok=True)
    files: defaultdict[str, bytes] = defaultdict(bytes)
    items: dict[object, object] = {}
    stored: dict[object, object] = {}

    def store(key: object, file: str, data: bytes) -> None:
        stored[key] = place(file, len(files[file]), len(data))
        files[file] += data

    for name, value in (values or {}).items():
        items[name] = value_metadata()
        store(index_key(name), _FIRST_FILE, value if isinstance(value, bytes) else item(value))
    for name, tensor in tensors.items():
        boxes = [chunk_metadata(chunk.start, chunk.shape) for chunk in tensor.chunks]
        items[name] = tensor_metadata(tensor.shape, boxes, dtype=tensor.dtype)
        for chunk in tensor.chunks:
            store(index_key(name, chunk.start), chunk.file, chunk.item)
    for file, content in files.items():
        (directory / file).write_bytes(content)
    metadata = distributed_metadata(items, stored, paths=None if paths is None else dict(paths))
    (directory / ".metadata").write_bytes(metadata)
    return directory


def save(directory: Path, state_dict: dict[str, Any], *, planner: SavePlanner | None = None, **options: Any) -> Path:
    """Save with torch, in this single process."""
    writer = FileSystemWriter(directory, **options)
    with warnings.catch_warnings(action="ignore"):
        state_dict_saver.save(state_dict, storage_writer=writer, planner=planner)  # without a process group
    return directory


class _LoadPlanner(_EmptyStateDictLoadPlanner):
    """torch's planner; torch 2.6 fails on metadata without paths, which later versions read."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        if metadata is not None and metadata.planner_data is None:
            metadata.planner_data = {}
        super().set_up_planner(state_dict, metadata, is_coordinator)


def torch_loaded(directory: Path) -> dict[str, Any]:
    """Return everything in a directory as torch rebuilds it."""
    state_dict: dict[str, Any] = {}
    with warnings.catch_warnings(action="ignore"):
        planner = _LoadPlanner()  # type: ignore[no-untyped-call]
        _load_state_dict(state_dict, FileSystemReader(directory), planner=planner, no_dist=True)
    return state_dict


def everything(checkpoint: sluice.Checkpoint) -> Any:
    """Read everything in a checkpoint, and refuse what cannot be read."""
    trees.refuse_opaques(checkpoint.index.tree, checkpoint.path)
    return trees.map_leaves(checkpoint.index.tree, lambda entry: sluice.LazyTensor(checkpoint, "", entry).read())
