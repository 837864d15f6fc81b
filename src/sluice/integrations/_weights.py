"""Names and tensors of weight files, one after the other, as inference engines take them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator

import torch

from sluice._errors import UnsupportedError
from sluice.api.checkpoint import Checkpoint
from sluice.api.checkpoint import open as open_checkpoint
from sluice.matching.selection import only_state_dict
from sluice.reading.reader import CheckpointReader, Pending
from sluice.reading.scan import Batch, ScanItem, in_batches

__all__ = ["weights"]

#: Tensors that are read together. Two batches are in memory; a larger tensor is a batch of its own.
_BATCH_BYTES = 64 << 20


def weights(
    files: Iterable[str | os.PathLike[str]], *, skip: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights of files in the order of their bytes; while one batch is used, the next is read.

    Args:
        files: Files of any format.
        skip: Whether a name is not read.

    Raises:
        UnsupportedError: A tensor is sparse or quantized by torch.
        CheckpointError: A file is damaged.
    """
    for file in files:
        with open_checkpoint(file) as whole:
            key = only_state_dict(whole.index.tree, whole.path)
            yield from _tensors(open_checkpoint(whole, key=key) if key else whole, skip)


def _tensors(checkpoint: Checkpoint, skip: Callable[[str], bool] | None) -> Iterator[tuple[str, torch.Tensor]]:
    storages, items = checkpoint.index.storages, []
    for name, lazy in checkpoint.items():
        if skip is not None and skip(name):
            continue
        if lazy.entry.composite is not None:
            problem = f"a {lazy.entry.layout} tensor is not passed to an inference engine"
            raise UnsupportedError(problem, file=checkpoint.path, tensor=name)
        first = storages[next(iter(lazy.entry.storages))]
        items.append(((first.file, first.offset, lazy.entry.storage_offset), ScanItem(lazy.entry, name)))
    items.sort(key=lambda item: item[0])
    waiting: tuple[Batch[str], Pending] | None = None
    with CheckpointReader(checkpoint) as reader:
        for batch in in_batches((item for _, item in items), _BATCH_BYTES):
            following = batch, reader.start([item.entry for item in batch])
            yield from _named(waiting)
            waiting = following
        yield from _named(waiting)


def _named(batch: tuple[Batch[str], Pending] | None) -> Iterator[tuple[str, torch.Tensor]]:
    if batch is not None:
        for item, tensor in zip(batch[0], batch[1](), strict=True):
            yield item.payload, tensor
