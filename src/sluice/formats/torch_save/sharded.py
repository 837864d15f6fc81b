"""Tensors that FSDP1 divided over ranks, as pickles of ``ShardedTensor``: what one rank's file has of each.

A pickle of a ``ShardedTensor`` is a wrapped tensor whose state is ``(local shards, metadata, process group, sharding
spec, RRefs)``. Objects of these classes become ``ShardRecord`` leaves with unchecked fields; this module checks them::

    Shard                   {"tensor": a tensor, "metadata": ShardMetadata}
    ShardMetadata           {"shard_offsets": [...], "shard_sizes": [...], "placement"}
    ShardedTensorMetadata   {"size": torch.Size, "shards_metadata": [ShardMetadata, ...], "tensor_properties"}

A tensor of which the file has everything is an ordinary ``Entry``. Otherwise the leaf is an ``UnsupportedValue``
with what it has in ``inner``, which ``checkpoint.sharded_tensors`` joins with the files of other ranks.

Refused: shards outside their tensor, or whose tensor has another shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES, MAX_SIGNED
from sluice._errors import FormatError
from sluice._options import Limits
from sluice.formats.pickles.machine import WrapperError
from sluice.formats.pickles.unpickler import Constructor, PendingObject
from sluice.records import Entry, Opaque, TorchSize, UnsupportedValue

__all__ = ["SHARDED_TENSOR", "ShardRecord", "local_shards", "record_class", "sharded_tensor"]

SHARDED_TENSOR = "torch.distributed._shard.sharded_tensor.api.ShardedTensor"

_RECORDS = frozenset(
    {
        ("torch.distributed._shard.sharded_tensor.shard", "Shard"),
        ("torch.distributed._shard.metadata", "ShardMetadata"),
        ("torch.distributed._shard.sharded_tensor.metadata", "ShardedTensorMetadata"),
    }
)

_PART = "a part of a tensor that FSDP divided over ranks"

_ALL_RANKS = "The other parts are in the files of other ranks: pass all of them as a list."


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRecord(Opaque):
    """An object of one of the classes above; an inert leaf if the tree contains it."""

    #: Its fields, unchecked.
    fields: Mapping[object, object]


def record_class(module: str, name: str) -> Opaque | None:
    """Return what builds the objects of one of the classes above, or None for any other global."""
    if f"{module}.{name}" == SHARDED_TENSOR:
        return Opaque(qualified_name=SHARDED_TENSOR)
    if (module, name) not in _RECORDS:
        return None
    kind = f"{module}.{name}"
    finish = partial(_record, kind)
    return Constructor(qualified_name=kind, build=lambda _: PendingObject(finish=finish), creates=True)


def _record(kind: str, state: object) -> ShardRecord:
    if type(state) is tuple and len(state) == 2 and state[0] is None:  # without slots
        state = state[1]
    if type(state) is not dict:
        raise FormatError("a record of a divided tensor has no fields", found=kind)
    return ShardRecord(qualified_name=kind, fields=state)


def sharded_tensor(state: object, limits: Limits) -> Entry:
    """Return a tensor of which a file has everything.

    Args:
        state: The state of the pickled ``ShardedTensor``.
        limits: Bounds on shards and dimensions.

    Raises:
        WrapperError: The file has a part of it.
        FormatError: The state is malformed.
    """
    shards, metadata = state[:2] if type(state) is tuple and len(state) >= 2 else (None, None)
    size = metadata.fields.get("size") if type(metadata) is ShardRecord else None
    if type(shards) is not list or len(shards) > limits.entries or type(size) is not TorchSize:
        raise FormatError("a divided tensor is malformed", expected="a list of shards, and metadata with a size")
    if len(size) > limits.dimensions or prod(max(count, 1) for count in size) * max(ITEM_BYTES.values()) > MAX_SIGNED:
        raise FormatError("a divided tensor has more bytes than torch can count", expected=MAX_SIGNED)
    inner: dict[str, object] = {"size": tuple(size)}
    for number, shard in enumerate(shards):
        fields = shard.fields if type(shard) is ShardRecord else {}
        place, entry = fields.get("metadata"), fields.get("tensor")
        start, sizes = (
            place.fields.get(field) if type(place) is ShardRecord else None
            for field in ("shard_offsets", "shard_sizes")
        )
        if (
            type(entry) is not Entry
            or entry.composite is not None
            or type(start) is not list
            or type(sizes) is not list
        ):
            raise FormatError("a shard of a divided tensor is malformed", expected="a dense tensor and its place")
        inside = entry.shape == tuple(sizes) and len(start) == len(size) == len(sizes)
        if not inside or not all(
            type(at) is int and 0 <= at <= whole - count for at, count, whole in zip(start, sizes, size, strict=True)
        ):
            found = f"{list(entry.shape)} at {start} of {list(size)}"[:200]
            raise FormatError("a shard does not fit into its tensor", expected=f"{sizes}"[:200], found=found)
        inner |= {f"{number}.start": tuple(start), str(number): replace(entry, parameter=False, attributes=None)}
    if len(shards) == 1 and inner["0"].shape == tuple(size):  # type: ignore[attr-defined]  # an entry
        return inner["0"]  # type: ignore[return-value]
    raise WrapperError(_PART, found=SHARDED_TENSOR, inner=inner, advice=_ALL_RANKS)


def local_shards(leaf: object) -> tuple[tuple[int, ...], list[tuple[tuple[int, ...], Entry]]] | None:
    """Return the size of a divided tensor, and the starts and entries of the shards that a file has; else None."""
    if not isinstance(leaf, UnsupportedValue) or leaf.qualified_name != SHARDED_TENSOR or leaf.inner is None:
        return None
    inner: Mapping[str, Any] = leaf.inner
    return inner["size"], [(inner[f"{key}.start"], value) for key, value in inner.items() if isinstance(value, Entry)]
