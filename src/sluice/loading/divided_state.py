"""Optimizer state of parameters that are divided over ranks (DTensors)."""

from __future__ import annotations

import torch
from msgspec.structs import replace

from sluice._errors import MismatchError
from sluice._geometry import contiguous_stride, is_dense
from sluice.dtensors.description import is_dtensor, local_of, region_held, with_local
from sluice.entries.regions import select_region
from sluice.records import Entry

__all__ = ["as_dtensor", "part_of_state", "stride_of_state"]


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
