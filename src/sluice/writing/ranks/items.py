"""The items of a distributed checkpoint: which chunks and values each rank stores, and where in its file.

An item is a ``torch.save`` file of one chunk or of one value. The region of a rank is one chunk for each of its boxes,
because a chunk is contiguous in the tensor. A value that is not a tensor is the same on every rank that has it; the
first of them stores it. All sizes are known beforehand, so that every rank knows the places of all items. Tensors are
described, not held.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from msgspec import Struct

from sluice._dtypes import ITEM_BYTES
from sluice._errors import SaveError
from sluice.records import row_major
from sluice.records.geometry import round_up
from sluice.writing.pickle_walk import walk_object
from sluice.writing.ranks.division import Box, DividedTensor, boxes
from sluice.writing.ranks.group import LEAD
from sluice.writing.torch_pickle import is_plain, pickle_object, refusal
from sluice.writing.torch_tensors import dense, stored
from sluice.writing.torch_zip import TorchZipWriter

__all__ = ["ItemLayout", "RankItem", "chunk_writer", "flatten", "lay_out_items", "value_item"]

_Path = tuple[str | int, ...]

#: Alignment of items, in bytes: that of the data in a zip record.
_ALIGNMENT_BYTES = 64


class RankItem(NamedTuple):
    """Where an item is stored."""

    #: The rank that writes the file.
    rank: int
    #: First byte of the item in the file.
    offset: int
    #: Size of the item, in bytes.
    nbytes: int


class ItemLayout(Struct, frozen=True, kw_only=True):
    """The items of all ranks."""

    #: Size of the file of each rank that stores anything, in bytes.
    sizes: dict[int, int]
    #: Place of each value.
    values: dict[str, RankItem]
    #: Chunks of each tensor: start and shape, the same in what the rank holds of the tensor, and the place.
    stored: dict[str, list[tuple[Box, Box, RankItem]]]


def lay_out_items(tensors: Mapping[str, DividedTensor], values: Mapping[str, tuple[int, int]]) -> ItemLayout:
    """Return the place of each item.

    Args:
        tensors: The tensors of all ranks.
        values: The rank that stores each value, and the size of its item in bytes.
    """
    layout = ItemLayout(sizes={}, values={}, stored={name: [] for name in tensors})

    def take(rank: int, nbytes: int) -> RankItem:
        offset = round_up(layout.sizes.get(rank, 0), _ALIGNMENT_BYTES)
        layout.sizes[rank] = offset + nbytes
        return RankItem(rank, offset, nbytes)

    for name, (rank, nbytes) in values.items():
        layout.values[name] = take(rank, nbytes)
    for name, tensor in tensors.items():
        parts = [
            (rank, box, own)
            for region, rank in tensor.parts.items()
            for box, own in zip(boxes(region), boxes(_local(region)), strict=True)
        ]
        whole = (0,) * len(tensor.shape), tensor.shape
        for rank, box, own in parts or [(LEAD, whole, whole)]:  # readers expect an item of every tensor
            layout.stored[name].append((box, own, take(rank, _item_bytes(tensor.dtype, box[1]))))
    return layout


def _local(region: tuple[tuple[tuple[int, int], ...], ...]) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the intervals of a region as intervals of the tensor that holds its elements."""
    local = []
    for intervals in region:
        at, own = 0, []
        for start, stop in intervals:
            own.append((at, at + stop - start))
            at += stop - start
        local.append(tuple(own))
    return tuple(local)


def chunk_writer(dtype: str, shape: tuple[int, ...]) -> TorchZipWriter:
    """Return a writer of the item of a chunk, whose data is storage 0."""
    return TorchZipWriter(_chunk_pickle(dtype, shape), [prod(shape) * ITEM_BYTES[dtype]])


@lru_cache(maxsize=4096)
def _chunk_pickle(dtype: str, shape: tuple[int, ...]) -> bytes:
    chunk = object()  # described, not held
    view = row_major(dtype, shape, 0)
    walked = walk_object(chunk, lambda _: {})
    return bytes(pickle_object(chunk, walked, [dense(view, stored(view, view.numel))]))


@lru_cache(maxsize=4096)
def _item_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    return chunk_writer(dtype, shape).file_bytes


def value_item(value: object, name: str) -> bytes:
    """Return the item of a value that is not a tensor.

    Raises:
        SaveError: It contains something that ``torch.load(weights_only=True)`` would refuse, or a tensor.
    """

    def attributes(inside: object) -> None:
        if isinstance(inside, torch.Tensor):
            raise SaveError("a tensor in a tuple or a set cannot be saved in this format", tensor=name)
        if not is_plain(inside):
            raise refusal(inside, name)

    walked = walk_object(value, attributes, by_value=True)
    writer = TorchZipWriter(pickle_object(value, walked, []), [])
    out = bytearray(writer.file_bytes)

    def write_at(at: int, data: bytes | bytearray | memoryview) -> None:
        out[at : at + len(data)] = data

    writer.finish(write_at)
    return bytes(out)


def flatten(state: object) -> tuple[dict[str, object], dict[str, _Path]]:
    """Return the values of a nested state dict by flat name, and their paths, as torch.distributed.checkpoint does.

    Dicts are always flattened, lists only if they contain tensors or dicts.

    Raises:
        SaveError: It is not a mapping, or values have no distinct names.
    """
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict  # torch's own planner calls it

    if not isinstance(state, Mapping):
        raise SaveError("this format can only hold a state dict", found=type(state).__name__)
    try:
        flat, paths = flatten_state_dict(dict(state))
        "".join(flat).encode()
    except (ValueError, RecursionError) as error:  # also of an object that contains itself
        raise SaveError("the values have no distinct flat names in UTF-8", found=str(error)[:200]) from error
    return flat, paths
