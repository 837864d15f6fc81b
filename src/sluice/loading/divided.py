"""Parts of a load into tensors that are divided over ranks (DTensors): devices, later copies, state of optimizers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from msgspec.structs import replace

from sluice._dtypes import ITEM_BYTES
from sluice._errors import MismatchError
from sluice.matching.match import Match
from sluice.modules.collect import ModuleState
from sluice.records import Entry
from sluice.records.geometry import contiguous_stride, is_dense
from sluice.sharding.dtensors import home, is_dtensor, local_of, region_held, with_local
from sluice.sharding.regions import select_region

__all__ = ["as_dtensor", "check_devices", "padding_copies", "part_of_state", "stride_of_state"]


def check_devices(state: ModuleState, matched: Match) -> None:
    """Refuse devices on which the mesh of a DTensor could not use it.

    Raises:
        MismatchError: There are such tensors.
    """
    for slot, request in zip(matched.slots, matched.requests, strict=True):
        if state.outline.slots[slot].region is None:
            continue
        own = home(state.tensors[slot])
        if request.device not in {own, "cpu"}:
            raise MismatchError(
                f"{request.name!r} is divided over a mesh whose part for this rank is on {own}, not on "
                f"{request.device}: call load_into without device=",
                tensor=request.name,
            )


def padding_copies(state: ModuleState, matched: Match) -> Iterator[tuple[int, int]]:
    """Yield the bytes of local tensors that fully_shard copies after the load, and of their copies."""
    for slot, request in zip(matched.slots, matched.requests, strict=True):
        shard = state.shards.get(slot)
        if shard is None or request.existing or request.device != "cpu":
            continue
        nbytes, padded = (n * ITEM_BYTES[request.dtype] for n in (request.entry.numel, shard.elements))
        if shard.pinned:
            yield nbytes, 1 << max(padded - 1, 0).bit_length()  # torch rounds page-locked memory up to a power of two
        elif padded != nbytes:
            yield nbytes, padded


def part_of_state(entry: Entry, path: str, key: object, parameter: torch.Tensor) -> Entry | None:
    """Return the part of a tensor of the state that belongs to this rank; None if each rank holds all of it.

    State of the parameter's shape is divided like the parameter, as ``torch.zeros_like`` divides it.

    Args:
        entry: The tensor.
        path: Its name, for messages.
        key: Its name in the state of the parameter.
        parameter: The parameter.

    Raises:
        MismatchError: Another shape: it is not known how the optimizer divides it.
    """
    if not is_dtensor(parameter) or key == "step":
        return None
    if entry.shape == tuple(parameter.shape) and entry.composite is None:
        return replace(select_region(entry, region_held(parameter)))  # a leaf of its own
    if not entry.shape:
        return None
    raise MismatchError(
        f"{path!r} is {list(entry.shape)} and its parameter {list(parameter.shape)}: state of a parameter that is "
        "divided over ranks (DTensor) is loaded if it has the parameter's shape",
        tensor=path,
    )


def stride_of_state(entry: Entry, parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the stride of the state of a parameter on this rank: that of the parameter's memory."""
    local = local_of(parameter)
    fits = tuple(local.shape) == entry.shape and is_dense(entry.shape, local.stride())
    return local.stride() if fits else contiguous_stride(entry.shape)


def as_dtensor(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return the state of a parameter on all ranks, from its part on this one."""
    return with_local(parameter, tensor.view(local_of(parameter).shape))
