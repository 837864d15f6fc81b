"""The pickle of an object with DTensors, for one torch file that all ranks write.

The file has whole tensors: a DTensor becomes a contiguous tensor of its own storage, on the CPU. Plain tensors keep
their views of shared storages; every rank has the same ones. The pickle is a function of values alone, so that equal
objects on two ranks give equal pickles.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

import torch
from msgspec import Struct

from sluice._dtypes import ITEM_BYTES, dtype_name, why_no_cast
from sluice._errors import SaveError
from sluice.entries.tree import component
from sluice.records.geometry import contiguous_stride
from sluice.sharding.dtensors import is_dtensor
from sluice.writing.items import StorageSpan, collect_spans, finished_dtype, refuse_unsupported, storage_key
from sluice.writing.pickle_opcodes import Call
from sluice.writing.pickle_walk import WalkedObject, walk_object
from sluice.writing.ranks.division import DividedTensor
from sluice.writing.torch_pickle import is_plain, pickle_object, refusal
from sluice.writing.torch_tensors import Geometry, dense, rebuilt

__all__ = ["OutlinedObject", "outline_object", "pickle_merged", "pickle_outlined", "storage_sizes"]


class OutlinedObject(Struct, frozen=True, kw_only=True):
    """An object, and the storages that its file needs."""

    #: The object.
    obj: object
    #: Its tensors in pickle order.
    walked: WalkedObject
    #: Name of the storage of each of these tensors.
    storage_of: tuple[str, ...]
    #: DTensors, and the needed range of other storages, by the name of their first tensor, in pickle order.
    storages: Mapping[str, torch.Tensor]
    #: First needed element of each storage of plain tensors, by name.
    starts: Mapping[str, int]


def outline_object(obj: object) -> OutlinedObject:
    """Collect the tensors and storages of an object; nothing is read.

    Raises:
        SaveError: It contains something that ``torch.load(weights_only=True)`` would refuse, or a tensor that is not
            dense.
    """
    walked = walk_object(obj, _attributes, by_value=True)
    names = _names(obj)
    spans = collect_spans(tensor for tensor in walked.tensors if not is_dtensor(tensor))
    named: dict[Hashable, str] = {}
    storages: dict[str, torch.Tensor] = {}
    starts: dict[str, int] = {}
    for tensor in walked.tensors:
        key = _key(tensor)
        if key in named:
            continue
        name = named[key] = names[id(tensor)]
        if is_dtensor(tensor):
            storages[name] = tensor
        else:
            span: StorageSpan = spans[key]
            storages[name], starts[name] = span.flat(), span.start
    storage_of = tuple(named[_key(tensor)] for tensor in walked.tensors)
    return OutlinedObject(obj=obj, walked=walked, storage_of=storage_of, storages=storages, starts=starts)


def pickle_outlined(
    outlined: OutlinedObject, tensors: Mapping[str, DividedTensor], ties: Mapping[str, str], dtype: str | None
) -> bytearray:
    """Return the pickle of the object.

    Args:
        outlined: From ``outline_object``.
        tensors: The stored storages, by name.
        ties: Names of storages that are not stored: ``{name: stored name}``.
        dtype: Dtype that real floating-point tensors are cast to; None keeps each dtype.

    Raises:
        SaveError: It contains something that ``torch.load(weights_only=True)`` would refuse.
    """
    return pickle_object(outlined.obj, outlined.walked, _descriptions(outlined, tensors, ties, dtype))


def _descriptions(
    outlined: OutlinedObject, tensors: Mapping[str, DividedTensor], ties: Mapping[str, str], dtype: str | None
) -> Iterator[Call]:
    numbers = {name: number for number, name in enumerate(tensors)}
    for tensor, own in zip(outlined.walked.tensors, outlined.storage_of, strict=True):
        name = ties.get(own, own)
        stored, whole = tensors[name], is_dtensor(tensor)
        why = why_no_cast(dtype_name(tensor.dtype), finished_dtype(tensor, dtype), requires_grad=tensor.requires_grad)
        if why:
            raise SaveError(why, tensor=own)
        geometry = Geometry(
            storage=numbers[name],
            elements=prod(stored.shape),
            dtype=stored.dtype,
            start=0 if whole else int(tensor.storage_offset()) - outlined.starts[own],
            shape=tuple(tensor.shape),
            stride=contiguous_stride(tuple(tensor.shape)) if whole else tensor.stride(),
        )
        yield rebuilt(
            partial(dense, geometry),
            requires_grad=tensor.requires_grad,
            parameter=isinstance(tensor, torch.nn.Parameter),
            attributes=_attributes(tensor),
        )


def pickle_merged(names: Iterable[str], tensors: Mapping[str, DividedTensor], ties: Mapping[str, str]) -> bytearray:
    """Return the pickle of the state dict of all ranks, if they hold tensors of different names: plain whole tensors.

    Args:
        names: Names of all tensors.
        tensors: The stored tensors, by name.
        ties: Names that are not stored: ``{name: stored name}``.
    """
    numbers = {name: number for number, name in enumerate(tensors)}
    merged = OrderedDict((name, object()) for name in names)  # described, not held
    walked = walk_object(merged, lambda _: {}, by_value=True)

    def described(name: str) -> Call:
        stored = ties.get(name, name)
        shape = tensors[stored].shape
        geometry = Geometry(
            storage=numbers[stored],
            elements=prod(shape),
            dtype=tensors[stored].dtype,
            start=0,
            shape=shape,
            stride=contiguous_stride(shape),
        )
        return dense(geometry)

    return pickle_object(merged, walked, map(described, merged))


def storage_sizes(tensors: Mapping[str, DividedTensor]) -> list[int]:
    """Return the size of each storage in bytes."""
    return [prod(tensor.shape) * ITEM_BYTES[tensor.dtype] for tensor in tensors.values()]


def _key(tensor: torch.Tensor) -> Hashable:
    return id(tensor) if is_dtensor(tensor) else storage_key(tensor)


def _attributes(value: Any) -> Mapping[str, object] | None:
    if is_dtensor(value):
        return {}  # its attributes describe how it is divided
    if isinstance(value, torch.Tensor):
        refuse_unsupported(value, "", dense=True)
        return vars(value)
    if is_plain(value):
        return None
    raise refusal(value)


def _names(obj: object) -> dict[int, str]:
    """Return a dotted name of each tensor in the containers of an object, by id."""
    names: dict[int, str] = {}
    seen: set[int] = set()
    waiting = [("", obj)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, torch.Tensor):
            names[id(value)] = name
            continue
        if not isinstance(value, (dict, list, tuple, set)) or id(value) in seen:
            continue
        seen.add(id(value))
        children = value.items() if isinstance(value, dict) else enumerate(value)
        waiting += [(f"{name}.{component(key)}" if name else component(key), child) for key, child in children]
    return names
